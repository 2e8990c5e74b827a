"""A transport whose calls are timed: what a hand-over is made of."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.types import FilledBlocks, KvChunk, KvConfirmation, KvHandshake, Ticket
from services.kvtransfer.transport import Digests, EarlyChunk, Outgoing, TransportName


class Stopwatch:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[what].append(time.perf_counter() - began)

    def medians(self) -> dict[str, float]:
        """In milliseconds, of what was timed since the last time."""
        found = {what: round(1000 * statistics.median(taken), 3) for what, taken in self._seconds.items()}
        self._seconds.clear()
        return found


class TimedWay:
    """Satisfies ``Outgoing``."""

    def __init__(self, way: Outgoing, watch: Stopwatch) -> None:
        self._way = way
        self._watch = watch

    @property
    def name(self) -> TransportName:
        return self._way.name

    def reaches(self, receiver: KvHandshake) -> bool:
        return self._way.reaches(receiver)

    async def open(self, receiver: KvHandshake) -> None:
        await self._way.open(receiver)

    def forget(self, receiver: KvHandshake) -> None:
        self._way.forget(receiver)

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return _TimedReceiver(self._way.receiver(hello, usual), self._watch)

    def is_streamed(self, receiver: KvHandshake) -> bool:
        return self._way.is_streamed(receiver)

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        with self._watch.on("chunk"):
            return await self._way.chunk(ticket, run, blocks)

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        early = self._way.early_chunk(ticket, run, blocks)
        return None if early is None else replace(early, checksums=lambda: self._timed(early.checksums()))

    async def _timed(self, checksums: Coroutine[Any, Any, Digests]) -> Digests:
        with self._watch.on("digest"):
            return await checksums


class _TimedReceiver(KvReceiverApi):
    def __init__(self, receiver: KvReceiverApi, watch: Stopwatch) -> None:
        self._receiver = receiver
        self._watch = watch

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self._receiver.handshake(hello)

    def offer(self, chunk: KvChunk) -> Awaitable[None]:
        """Timed from when it goes."""
        return self._timed("offer", lambda: self._receiver.offer(chunk))

    def confirm(self, confirmation: KvConfirmation) -> Awaitable[None]:
        """Likewise."""
        return self._timed("confirm", lambda: self._receiver.confirm(confirmation))

    def _timed(self, what: str, call: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        watched = ExitStack()
        watched.enter_context(self._watch.on(what))
        return _ended(watched, call())


async def _ended(watched: ExitStack, call: Awaitable[None]) -> None:
    with watched:
        await call
