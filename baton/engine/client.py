"""The engine as its front sees it: ``EngineApi`` over a channel to an engine process (or thread).

``async with spawn_engine(config) as engine`` is the whole of it. Leaving a reservation or a prefill, by whatever way,
sends one Release: the engine then holds nothing for it after the step in flight. When the engine ends, every waiter
gets PeerUnavailable and ``closed()`` returns, so that the front can go too.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count

from baton.core.clock import SystemClock
from baton.core.errors import PeerUnavailable
from baton.core.types import DevicePool, EngineStats, ModelCard, Tier, TokenChunk, TokenRequest
from baton.engine.blocks import BlockChange
from baton.engine.cached_names import CachedNames
from baton.engine.calls import Call, EngineLinks, EnginePrefill, EngineReservation
from baton.engine.channel import AsyncChannel, ChannelClosed, SyncChannel
from baton.engine.config import EngineConfig
from baton.engine.mailbox import Mailbox
from baton.engine.messages import (
    Admitted,
    Answered,
    Attach,
    BlockReport,
    BlocksRead,
    Command,
    Detach,
    Event,
    Failed,
    Filled,
    First,
    Load,
    LoadFailed,
    Loading,
    Prefill,
    ReadCached,
    Ready,
    Refused,
    Release,
    Reserve,
    StepReport,
    Streamed,
    Written,
)
from baton.engine.ownpool import OwnPool
from baton.engine.process import plain_drafter, serve
from baton.engine.runner import Runner
from baton.engine.sharedpool import Descriptors

STOP_SECONDS = 5.0  # an engine process that does not end by itself after its channel has closed is killed


def _ignore(message: str) -> None:
    """For callers who do not show progress."""


class EngineClient:
    """Satisfies ``EngineApi``. Made by ``spawn_engine`` and ``threaded_engine``."""

    def __init__(
        self,
        channel: AsyncChannel,
        ready: Ready,
        pool: OwnPool | None,
        exit_status: Callable[[], Awaitable[str]],
    ) -> None:
        """``exit_status`` says how the engine ended, once its channel has closed."""
        self._channel = channel
        self._pool = pool
        self._device_pool = ready.device_pool
        self.links = EngineLinks(self) if ready.has_links else None
        self._exit_status = exit_status
        self._card = ready.card
        self._stats = ready.stats
        self._calls: dict[int, Call] = {}
        self._replies: dict[int, Mailbox[bytes]] = {}
        self._names = CachedNames()
        self._numbers = count(1)
        self._end = ""  # why the engine has ended
        self._ended = asyncio.Event()

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def stats(self) -> EngineStats:
        return self._stats

    def tokens_before(self, tier: Tier) -> int:
        ahead = (w.context_tokens for c in self._calls.values() if (w := c.waiting) and not w.tier.is_below(tier))
        return self._stats.backlog_before(tier) + sum(ahead)

    @property
    def pool(self) -> OwnPool | None:
        return self._pool

    @property
    def device_pool(self) -> DevicePool | None:
        return self._device_pool

    def attach(self, pool: DevicePool) -> int:
        source = next(self._numbers)
        self.send(Attach(source, pool))
        return source

    def detach(self, source: int) -> None:
        if not self._end:
            self._channel.send(Detach(source))

    @asynccontextmanager
    async def reserve(self, request: TokenRequest, compute_up_to: int = 0) -> AsyncIterator[EngineReservation]:
        with self._opened() as call:
            self.send(Reserve(call.key, request, compute_up_to))
            yield EngineReservation(self, call, await call.admitted.get(), self._card.format)

    @asynccontextmanager
    async def prefill(self, request: TokenRequest, compute_up_to: int | None = None) -> AsyncIterator[EnginePrefill]:
        with self._opened(waiting=request) as call:
            self.send(Prefill(call.key, request, request.context_tokens if compute_up_to is None else compute_up_to))
            yield EnginePrefill(self, call, await call.admitted.get(), self._card.format)

    async def read_cached(self, names: Sequence[bytes]) -> bytes:
        with self.operation() as (op, reply):
            self.send(ReadCached(op, tuple(names)))
            return await reply.get()

    def cached_blocks(self) -> tuple[int, frozenset[bytes]]:
        """The hashes in the prefix cache, and the sequence number of the last change they include."""
        return self._names.all()

    def cached_since(self, sequence: int) -> tuple[int, Sequence[bytes]]:
        """Those that came after the change ``sequence`` and are still there, in order, and the last change's number."""
        return self._names.since(sequence)

    def leading_cached(self, names: Sequence[bytes]) -> int:
        return self._names.leading(names)

    def block_changes(self) -> AsyncGenerator[BlockChange, None]:
        """Changes of the prefix cache from the first ``anext`` on. A consumer that sees a gap in the sequence numbers
        starts over from ``cached_blocks``."""
        return self._names.changes()

    async def closed(self) -> str:
        """Returns when the engine has ended, with why."""
        await self._ended.wait()
        return self._end

    # --- the link of reservations and prefills ------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        if self._end:
            raise PeerUnavailable(self._end)
        self._channel.send(command)

    async def drain(self) -> None:
        await self._channel.drain()

    @contextmanager
    def operation(self) -> Iterator[tuple[int, Mailbox[bytes]]]:
        op = next(self._numbers)
        reply: Mailbox[bytes] = Mailbox()
        self._replies[op] = reply
        try:
            yield op, reply
        finally:
            del self._replies[op]

    @contextmanager
    def _opened(self, waiting: TokenRequest | None = None) -> Iterator[Call]:
        call = Call(next(self._numbers), waiting)
        self._calls[call.key] = call
        try:
            yield call
        finally:
            self._calls.pop(call.key).is_held = False
            if not self._end:
                self._channel.send(Release(call.key))

    # --- what comes in ------------------------------------------------------------------------------------------------

    async def read_reports(self) -> None:
        """Deliver reports until the engine hangs up. Run by whoever made the client, in a task beside its users."""
        try:
            while True:
                self._on_report(await self._channel.receive())
        except ChannelClosed:
            self._on_end("the engine has ended")
            self._end = f"the engine has ended: {await self._exit_status()}"
        finally:
            self._on_end(self._end or "the engine was closed")
            self._ended.set()

    def _on_report(self, report: StepReport | BlockReport) -> None:
        if isinstance(report, BlockReport):
            for event in report.events:
                self._on_event(event)
            return
        self._stats = report.stats
        if report.change is not None:
            self._names.apply(report.change)
        for key, token_id in zip(report.drawn.keys, report.drawn.token_ids, strict=True):
            call = self._calls.get(key)
            if call is not None:
                call.chunks.put(TokenChunk((token_id,)))
        for event in report.events:
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        """Hand an event to whom it concerns; those of callers who have left in the meantime concern nobody."""
        if isinstance(event, Written | BlocksRead | Answered | Refused):
            if event.op in self._replies:
                self._on_reply(self._replies[event.op], event)
        elif event.key in self._calls:
            self._on_call(self._calls[event.key], event)

    def _on_reply(self, reply: Mailbox[bytes], event: Written | BlocksRead | Answered | Refused) -> None:
        match event:
            case Written():
                reply.put(b"")
            case BlocksRead(_, payload) | Answered(_, payload):
                reply.put(payload)
            case Refused(_, error):
                reply.fail(error)

    def _on_call(self, call: Call, event: Admitted | Filled | First | Streamed | Failed) -> None:
        match event:
            case Admitted():
                call.admit(event)
            case Filled(_, blocks, is_last):
                call.filled.put(blocks)
                if is_last:
                    call.filled.close()
            case First(_, first):
                call.first.put(first)
            case Streamed(_, chunk):
                call.chunks.put(chunk)
                if chunk.finish is not None:
                    call.chunks.close()
            case Failed(_, error):
                call.fail(error)

    def _on_end(self, reason: str) -> None:
        self._end = reason
        for waiting in (*self._calls.values(), *self._replies.values(), self._names):
            waiting.fail(PeerUnavailable(reason))


@asynccontextmanager
async def spawn_engine(
    config: EngineConfig, *, on_progress: Callable[[str], None] = _ignore
) -> AsyncIterator[EngineClient]:
    """An engine in a process of its own, loaded and ready; it ends with the ``async with``, or with this process.

    Raises what loading raised (ModelError, ConfigError, ...), PeerUnavailable when the process died while loading.
    """
    ours, theirs = socket.socketpair()
    near, far = socket.socketpair()
    async with _child(theirs, far) as process, _channel(ours) as channel, _descriptors(near) as descriptors:

        async def exit_status() -> str:
            return f"exit code {await process.wait()}"

        channel.send(Load(config))
        try:
            ready = await _until_ready(channel, on_progress)
        except ChannelClosed as error:
            raise PeerUnavailable(f"the engine ended while loading: {await exit_status()}") from error
        except asyncio.CancelledError:
            _kill(process)  # it is busy loading and would not notice for a while
            raise
        async with _client(channel, descriptors, ready, exit_status) as client:
            yield client


@asynccontextmanager
async def threaded_engine(runner: Runner, config: EngineConfig) -> AsyncIterator[EngineClient]:
    """The same engine in a thread of this process, over the same messages: for tests and ``tests/stack.py``."""
    ours, theirs = socket.socketpair()
    near, far = socket.socketpair()
    thread = threading.Thread(target=_serve_thread, args=(runner, config, theirs, far), name="engine", daemon=True)

    async def exit_status() -> str:
        await asyncio.to_thread(thread.join)
        return "its thread is done"

    try:
        async with _channel(ours) as channel, _descriptors(near) as descriptors:
            thread.start()
            ready = await _until_ready(channel, _ignore)
            async with _client(channel, descriptors, ready, exit_status) as client:
                yield client
    finally:
        await exit_status()


def _serve_thread(runner: Runner, config: EngineConfig, sock: socket.socket, others: socket.socket) -> None:
    channel, descriptors = SyncChannel(sock), Descriptors(others)
    try:
        serve(runner, plain_drafter(config), config, channel, SystemClock(), descriptors)
    except ChannelClosed:
        return
    finally:
        channel.close()
        descriptors.close()
        runner.close()


async def _until_ready(channel: AsyncChannel, on_progress: Callable[[str], None]) -> Ready:
    while True:
        message = await channel.receive()
        if isinstance(message, Ready):
            return message
        if isinstance(message, LoadFailed):
            raise message.error
        assert isinstance(message, Loading)
        on_progress(message.message)


@asynccontextmanager
async def _client(
    channel: AsyncChannel, descriptors: Descriptors, ready: Ready, exit_status: Callable[[], Awaitable[str]]
) -> AsyncIterator[EngineClient]:
    """A client with its reader running; nothing of it is left afterwards."""
    pool = OwnPool(descriptors.receive(), ready.card.format) if ready.is_shared else None
    client = EngineClient(channel, ready, pool, exit_status)
    reader = asyncio.create_task(client.read_reports(), name="engine-reports")
    try:
        yield client
    finally:
        if pool is not None:
            pool.close()
        reader.cancel()
        await asyncio.wait({reader})
        if not reader.cancelled():
            reader.result()  # a bug in the reader must not pass for the engine's end


@asynccontextmanager
async def _channel(sock: socket.socket) -> AsyncIterator[AsyncChannel]:
    channel = await AsyncChannel.open(sock)
    try:
        yield channel
    finally:
        await channel.close()


@asynccontextmanager
async def _descriptors(sock: socket.socket) -> AsyncIterator[Descriptors]:
    descriptors = Descriptors(sock)
    try:
        yield descriptors
    finally:
        descriptors.close()


@asynccontextmanager
async def _child(theirs: socket.socket, others: socket.socket) -> AsyncIterator[asyncio.subprocess.Process]:
    """The engine's process. It ends by itself when the channel closes, and is killed if it does not."""
    fds = [theirs.fileno(), others.fileno()]
    ends = ("--fd", str(fds[0]), "--descriptors", str(fds[1]), "--parent", str(os.getpid()))
    with theirs, others:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.engine.process", *ends, pass_fds=fds
        )
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
    finally:
        if process.returncode is None:
            _kill(process)
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it has just ended by itself
        process.kill()
