"""What a front may have done with blocks on a device: copied out of other pools, digested, sent and received.

Commands begin copies, ``look`` tells of those that are done. Which blocks a request may have read or filled is asked
when a copy begins; for what is received, when it has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import BatonError, TransferRejected, TransportUnavailable
from baton.core.types import KvFormat
from baton.engine.device_copies import Communicators, Copy, DeviceCopies, PoolMapping, Span
from baton.engine.links import PairLink
from baton.engine.messages import (
    Abandon,
    Answered,
    Attach,
    Detach,
    DeviceCommand,
    Digest,
    Event,
    Invite,
    Join,
    Leave,
    Pull,
    Receive,
    Refused,
    Send,
)
from baton.engine.sequence import Sequence as Request
from baton.engine.sequence import Stage

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.001  # between two looks of an engine that has nothing else to do: what a poll can wait for
SPIN_SECONDS = 0.003  # after something has happened it looks without a pause: most copies take less

Find = Callable[[int], Request | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    op: int
    key: int
    copy: Copy
    source: PoolMapping | None


class DeviceAccess:
    """Answers never come at once, refusals may. Never raises for a request's sake."""

    def __init__(self, copies: DeviceCopies | None, layout: KvFormat, find: Find, clock: Clock) -> None:
        """``find`` gives the request of a key, or None when it has ended."""
        self._copies = copies
        self._layout = layout
        self._find = find
        self._clock = clock
        self._pools: dict[int, PoolMapping] = {}
        self._leaving: list[PoolMapping] = []  # detached, and still copied from
        self._running: list[_Running] = []
        self._links: dict[int, PairLink] = {}
        self._dead: dict[int, TransportUnavailable] = {}  # links that have failed, until they are left
        self._active_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Something is under way that only ``look`` tells of."""
        return bool(self._running) or any(link.is_busy for link in self._links.values())

    @property
    def look_within(self) -> float | None:
        """Seconds after which to look again; None when nothing is under way."""
        if not self.is_busy:
            return None
        return 0.0 if self._clock.now() - self._active_at < SPIN_SECONDS else LOOK_SECONDS

    def handle(self, command: DeviceCommand) -> Iterator[Event]:
        self._active_at = self._clock.now()
        try:
            yield from self._begin(command)
        except BatonError as error:
            if isinstance(command, Attach | Detach | Join | Leave | Abandon):
                # Nobody waits for these; what is missing is told to whom it fails.
                log.warning("device transport", extra={"command": type(command).__name__, "error": error.message})
            else:
                yield Refused(command.op, error)

    def fence(self, key: int) -> None:
        """Others than copies are to touch the request's blocks: not before the copies under way have ended."""
        if self._copies is None:
            return
        if any(running.key == key for running in self._running) or any(
            link.is_filling(key) for link in self._links.values()
        ):
            self._copies.fence()

    def look(self) -> Iterator[Event]:
        """Go on with what is under way; what has ended since the last time."""
        if not self._running and not self._links:
            return
        done = [running for running in self._running if running.copy.is_done()]
        for running in done:
            self._running.remove(running)
            yield Answered(running.op, running.copy.digests())
        if done and self._leaving:
            self._close_left()
        for number, link in list(self._links.items()):
            for event in link.look():
                self._active_at = self._clock.now()
                yield event
            if link.failure is not None:  # what it holds on the device is free again
                del self._links[number]
                self._dead[number] = link.failure

    def close(self) -> None:
        """Nothing stays joined or mapped."""
        for link in self._links.values():
            list(link.fail(TransportUnavailable("link: the engine ends")))
        self._links.clear()
        if self._copies is not None:
            self._copies.drain()
        self._running.clear()
        for source in list(self._pools):
            self._detach(source)
        self._close_left()

    def _begin(self, command: DeviceCommand) -> Iterator[Event]:
        copies = self._copies
        if copies is None:
            raise TransportUnavailable("this engine's pool is on no device")
        match command:
            case Attach(source, pool):
                self._pools[source] = copies.open(pool)
            case Detach(source):
                self._detach(source)
            case Pull():
                self._pull(copies, command)
            case Digest(key, op, first, filled, strong):
                span = self._span(first, filled, strong)
                self._running.append(_Running(op, key, copies.digest(self._held(key, span), span), None))
            case _:
                yield from self._begin_on_link(copies.communicators, command)

    def _begin_on_link(
        self, communicators: Communicators | None, command: Invite | Join | Leave | Send | Receive | Abandon
    ) -> Iterator[Event]:
        if communicators is None:
            raise TransportUnavailable("this engine has no communicators")
        match command:
            case Invite(op):
                yield Answered(op, communicators.invite())
            case Join(link, rank, invitation, seconds):
                if link not in self._links and link not in self._dead:
                    communicator = communicators.join(invitation, rank)
                    self._links[link] = PairLink(communicator, rank, seconds, self._clock)
            case Leave(link):
                self._dead.pop(link, None)
                left = self._links.pop(link, None)
                if left is not None:
                    yield from left.fail(TransportUnavailable("link: it was left"))
            case Send() | Receive():
                self._exchange(command)
            case Abandon(op):
                for each in self._links.values():
                    each.abandon(op)

    def _detach(self, source: int) -> None:
        """Unmap the pool, as soon as nothing copies from it."""
        mapping = self._pools.pop(source, None)
        if mapping is not None:
            self._leaving.append(mapping)
            self._close_left()

    def _pull(self, copies: DeviceCopies, command: Pull) -> None:
        source = self._pools.get(command.source)
        if source is None:
            raise TransportUnavailable(f"the pool {command.source} is not mapped here")
        span = self._span(command.first_block, command.filled, command.strong)
        if span.count != len(command.source_blocks):
            raise TransferRejected(f"strong: {len(command.source_blocks)} blocks need as many bytes, got {span.count}")
        if not all(0 <= block < source.blocks for block in command.source_blocks):
            raise TransportUnavailable(f"the pool {command.source} has {source.blocks} blocks, others were named")
        copy = copies.pull(self._waiting(command.key, span), source, command.source_blocks, span)
        self._running.append(_Running(command.op, command.key, copy, source))

    def _exchange(self, command: Send | Receive) -> None:
        link = self._links.get(command.link)
        if link is None:
            raise self._dead.get(command.link) or TransportUnavailable(f"link {command.link} is not joined")
        span = self._span(command.first_block, command.filled, command.strong)
        find = self._held if isinstance(command, Send) else self._waiting
        size = span.count * self._layout.block_bytes
        link.add(command.key, command.op, command.number, size, span, lambda: find(command.key, span))

    def _span(self, first: int, filled: int, strong: bytes) -> Span:
        if not strong or not 0 < filled <= self._layout.block_size:
            raise TransferRejected(f"blocks: {len(strong)} with {filled} filled slots in the last one cannot be meant")
        return Span(first, filled, strong)

    def _held(self, key: int, span: Span) -> Sequence[int]:
        """The blocks that a request has, to be read."""
        request, last = self._find(key), span.first_ordinal + span.count
        if request is None or not 0 <= span.first_ordinal < last <= len(request.blocks):
            raise TransferRejected(f"blocks {span.first_ordinal}..{last - 1} are not the request's")
        return tuple(request.blocks[span.first_ordinal : last])

    def _waiting(self, key: int, span: Span) -> Sequence[int]:
        """The blocks of a reservation that wait to be filled."""
        return tuple(writable(self._find(key), span.first_ordinal, span.count))

    def _close_left(self) -> None:
        used = {id(running.source) for running in self._running}
        for mapping in [each for each in self._leaving if id(each) not in used]:
            self._leaving.remove(mapping)
            mapping.close()


def held(request: Request | None) -> Request:
    """The request, if its blocks wait to be filled. TransferRejected otherwise."""
    if request is None or request.stage is not Stage.HELD:
        raise TransferRejected("the request holds no blocks that wait to be written")
    return request


def writable(request: Request | None, first: int, count: int) -> Sequence[int]:
    """The blocks to be filled: only the request's own, and only before it is computed. TransferRejected otherwise."""
    owner, last = held(request), first + count
    if not count or first < owner.hits or last > owner.context_blocks():
        raise TransferRejected(
            f"blocks {first}..{last - 1}: only {owner.hits}..{owner.context_blocks() - 1} may be written"
        )
    return owner.blocks[first:last]
