"""Switches by which a test holds or breaks the system at a stage of a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from baton.core.api import KvReceiverApi
from baton.core.errors import BatonError
from baton.core.types import KvChunk, KvConfirmation, KvHandshake
from baton.engine.runner import Part

GENEROUS_SECONDS = 30.0


class StepGate:
    """An engine's ``on_step`` hook that can hold the engine before a step which does what a test waits for."""

    def __init__(self) -> None:
        self._wanted: Callable[[Sequence[Part]], bool] | None = None
        self._reached = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self.steps: list[tuple[tuple[int, int], ...]] = []  # (start, end) of each part of each step

    def __call__(self, parts: Sequence[Part]) -> None:
        self.steps.append(tuple((part.start, part.end) for part in parts))
        if self._wanted is not None and self._wanted(parts):
            self._wanted = None
            self._reached.set()
            self._open.wait(GENEROUS_SECONDS)

    def hold(self, wanted: Callable[[Sequence[Part]], bool] = lambda _: True) -> None:
        """Stop before the next step whose parts are ``wanted``."""
        self._reached.clear()
        self._open.clear()
        self._wanted = wanted

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, GENEROUS_SECONDS), "the engine never came to the step"

    def release(self) -> None:
        self._wanted = None
        self._open.set()


class OfferGate:
    """Wraps a receiver: may hold offers, change chunks, or fail, as ``on_offer`` decides before each is passed on."""

    def __init__(self, inner: KvReceiverApi) -> None:
        self.inner = inner
        self.on_offer: Callable[[KvChunk], Any] | None = None
        self.offers: list[KvChunk] = []
        self.confirmations: list[KvConfirmation] = []
        self.refused: list[BatonError] = []

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.inner.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.offers.append(chunk)
        if self.on_offer is not None:
            changed = self.on_offer(chunk)
            chunk = await changed if asyncio.iscoroutine(changed) else changed
        with self._noting():
            await self.inner.offer(chunk)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.confirmations.append(confirmation)
        with self._noting():
            await self.inner.confirm(confirmation)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self.refused.append(error)
            raise
