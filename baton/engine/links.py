"""Links: pairs of engines that hand blocks over through a communicator. Pure but for the communicator it is given.

The one who sends numbers its messages, and both ends handle them in that order. A message goes: packed into a staging
slot, sent; or received into a slot, looked at again (does the request still hold its blocks?), unpacked. So bytes land
in blocks only by the receiver's own hand. A link on which anything takes longer than its limit, or whose communicator
reports an error, is aborted and dead from then on; whoever needs one makes another. A link with nothing to do is fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.core.clock import Clock
from baton.core.errors import BatonError, TransportUnavailable
from baton.engine.device_copies import Communicator, Copy, Mark, Span
from baton.engine.messages import Answered, Event, Refused

SENDER, RECEIVER = 0, 1


class Stage(Enum):
    QUEUED = auto()
    PACKING = auto()  # sender
    PACKED = auto()
    MOVING = auto()  # handed to the communicator, which has not settled
    MOVED = auto()  # waits for its mark
    UNPACKING = auto()  # receiver


@dataclass(slots=True, eq=False)
class Message:
    """``key`` is the request's; ``blocks`` gives the blocks to fill or read when it is their turn, or raises what the
    request is to be told."""

    key: int
    op: int
    number: int
    size: int
    span: Span
    blocks: Callable[[], Sequence[int]]
    since: float
    stage: Stage = Stage.QUEUED
    is_abandoned: bool = False
    slot: int = -1
    copy: Copy | None = None
    mark: Mark | None = None


class PairLink:
    """One end of a link."""

    def __init__(self, communicator: Communicator, rank: int, seconds: float, clock: Clock) -> None:
        """It is joining already. ``seconds`` bounds joining, and each message from its first move to its end."""
        self._communicator = communicator
        self._rank = rank
        self._seconds = seconds
        self._clock = clock
        self._since = clock.now()
        self._is_joined = False
        self._free = list(range(communicator.slots))
        self._messages: dict[int, Message] = {}
        self._next_begin = 0
        self._next_move = 0
        self._moving: Message | None = None
        self._failure: TransportUnavailable | None = None

    @property
    def failure(self) -> TransportUnavailable | None:
        """Why it is dead; its communicator is of no more use then."""
        return self._failure

    @property
    def is_busy(self) -> bool:
        """Looking at it again may bring something."""
        return self._failure is None and (bool(self._messages) or not self._is_joined)

    def add(self, key: int, op: int, number: int, size: int, span: Span, blocks: Callable[[], Sequence[int]]) -> None:
        """Queue a message. Raises TransportUnavailable when the link is dead, or the message cannot be on it."""
        if self._failure is not None:
            raise self._failure
        if size > self._communicator.slot_bytes:
            raise TransportUnavailable(f"link: a message has {self._communicator.slot_bytes} bytes at most, got {size}")
        if number in self._messages or number < self._next_begin:
            raise TransportUnavailable(f"link: message {number} was begun before")
        self._messages[number] = Message(key, op, number, size, span, blocks, self._clock.now())

    def abandon(self, op: int) -> None:
        """The message keeps its place, and is thrown away when it comes."""
        for message in self._messages.values():
            message.is_abandoned |= message.op == op

    def is_filling(self, key: int) -> bool:
        """Whether blocks of that request are being filled at this moment."""
        return any(each.key == key and each.stage is Stage.UNPACKING for each in self._messages.values())

    def look(self) -> Iterator[Event]:
        """Go on with everything that can; what there is to tell."""
        if self._failure is not None:
            return
        try:
            yield from self._advance()
        except TransportUnavailable as error:
            yield from self.fail(error)

    def fail(self, error: TransportUnavailable) -> Iterator[Event]:
        """Abort; every message that is not done is refused with ``error``."""
        if self._failure is None:
            self._failure = error
            self._communicator.abort()
        messages, self._messages = list(self._messages.values()), {}
        for message in messages:
            yield Refused(message.op, error)

    def _advance(self) -> Iterator[Event]:
        self._check_time()
        if self._communicator.is_settled():
            self._is_joined = True
            self._settle()
        if self._rank == SENDER:
            self._begin_packing()
        for message in list(self._messages.values()):
            yield from self._look_at(message)
        self._move_next()

    def _check_time(self) -> None:
        now = self._clock.now()
        if not self._is_joined and now - self._since > self._seconds:
            raise TransportUnavailable(f"link: the other end did not join within {self._seconds} s")
        for message in self._messages.values():
            if now - message.since > self._seconds and (self._rank == RECEIVER or message.stage is not Stage.QUEUED):
                raise TransportUnavailable(f"link: message {message.number} took longer than {self._seconds} s")

    def _begin_packing(self) -> None:
        while self._free and self._next_begin in self._messages:
            message = self._messages[self._next_begin]
            self._next_begin += 1
            message.slot, message.since = self._free.pop(), self._clock.now()
            try:
                message.copy = self._communicator.pack(message.slot, message.blocks(), message.span)
                message.stage = Stage.PACKING
            except BatonError as error:  # the request has ended: its number goes out all the same, and is thrown away
                message.stage = Stage.PACKED
                message.copy = _Refusal(error)

    def _look_at(self, message: Message) -> Iterator[Event]:
        copy = message.copy
        if isinstance(copy, _Refusal):
            message.copy = None
            yield Refused(message.op, copy.error)
        elif message.stage is Stage.PACKING and copy is not None and copy.is_done():
            message.stage, message.copy = Stage.PACKED, None
            yield Answered(message.op, copy.digests())
        elif message.stage is Stage.MOVED and message.mark is not None and message.mark.is_done():
            yield from self._on_moved(message)
        elif message.stage is Stage.UNPACKING and copy is not None and copy.is_done():
            self._end(message)
            yield Answered(message.op, copy.digests())

    def _on_moved(self, message: Message) -> Iterator[Event]:
        if self._rank == SENDER or message.is_abandoned:
            self._end(message)
            return
        try:
            message.copy = self._communicator.unpack(message.slot, message.blocks(), message.span)
            message.stage = Stage.UNPACKING
        except BatonError as error:
            self._end(message)
            yield Refused(message.op, error)

    def _move_next(self) -> None:
        """One at a time: the communicator has to settle in between."""
        message = self._messages.get(self._next_move)
        if message is None or self._moving is not None or not self._is_joined:
            return
        if self._rank == SENDER:
            if message.stage is not Stage.PACKED:
                return
            self._communicator.send(message.slot, message.size)
        else:
            if not self._free:
                return
            message.slot = self._free.pop()
            self._communicator.receive(message.slot, message.size)
            self._next_begin += 1
        message.stage = Stage.MOVING
        self._moving = message
        self._next_move += 1
        if self._communicator.is_settled():
            self._settle()

    def _settle(self) -> None:
        if self._moving is not None:
            self._moving.mark = self._communicator.mark()
            self._moving.stage = Stage.MOVED
            self._moving = None

    def _end(self, message: Message) -> None:
        self._free.append(message.slot)
        del self._messages[message.number]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Stands in for the copy of a message whose blocks could not be read."""

    error: BatonError

    def is_done(self) -> bool:
        return True

    def digests(self) -> bytes:
        return b""
