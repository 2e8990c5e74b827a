"""What a front and its engine say to each other. Plain data; ``baton.engine.channel`` carries it.

``key`` names one request for as long as the front holds it; ``op`` one read or write. The front counts both up.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from baton.core.errors import BatonError
from baton.core.types import DevicePool, EngineStats, FilledBlocks, FirstToken, ModelCard, TokenChunk, TokenRequest
from baton.engine.blocks import BlockChange
from baton.engine.config import EngineConfig


class Message:
    """Pickled as its class and its fields: a third of what dataclasses take that are frozen and have slots."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)


# --- front to engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load(Message):
    """The first message to an engine process: load this model."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Reserve(Message):
    """``compute_up_to``: with at most so many uncached context tokens at admission the request starts by itself, as if
    Decode(key, None) had come."""

    key: int
    request: TokenRequest
    compute_up_to: int = 0


@dataclass(frozen=True, slots=True)
class Prefill(Message):
    """``compute_up_to`` as in Reserve; one that does not start by itself waits for Decode(key, None)."""

    key: int
    request: TokenRequest
    compute_up_to: int


@dataclass(frozen=True, slots=True)
class Decode(Message):
    """Start a held request: on written blocks with the token that was drawn elsewhere, or (None) by computing what is
    neither cached nor imported."""

    key: int
    first: FirstToken | None


@dataclass(frozen=True, slots=True)
class Write(Message):
    """KV bytes for consecutive blocks of a reservation. The payload travels beside the pickle, not in it."""

    key: int
    op: int
    first_block: int
    payload: bytes | memoryview

    def __reduce__(self) -> tuple[object, ...]:
        return (Write, (self.key, self.op, self.first_block, pickle.PickleBuffer(self.payload)))


@dataclass(frozen=True, slots=True)
class Read(Message):
    key: int
    op: int
    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Attach(Message):
    """Map a pool in GPU memory; it is called ``source`` from now on."""

    source: int
    pool: DevicePool


@dataclass(frozen=True, slots=True)
class Detach(Message):
    source: int


@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Copy blocks of an attached pool into consecutive blocks of a held request; ``filled`` slots of the last one.

    ``strong`` has a byte for each block, 1 where the answer needs both lanes of the digest.
    """

    key: int
    op: int
    first_block: int
    source: int
    source_blocks: tuple[int, ...]
    filled: int
    strong: bytes


@dataclass(frozen=True, slots=True)
class Digest(Message):
    """Answer with a digest of consecutive blocks of a request, one for each byte of ``strong``."""

    key: int
    op: int
    first_block: int
    filled: int
    strong: bytes


@dataclass(frozen=True, slots=True)
class Invite(Message):
    """Answer with the invitation to a link that another engine can join."""

    op: int


@dataclass(frozen=True, slots=True)
class Join(Message):
    """Take part in ``link``, as the one who sends (rank 0) or receives (1). Nothing on it may take longer than
    ``seconds``."""

    link: int
    rank: int
    invitation: bytes = field(repr=False)
    seconds: float


@dataclass(frozen=True, slots=True)
class Leave(Message):
    link: int


@dataclass(frozen=True, slots=True)
class Send(Message):
    """Message ``number`` of ``link``: consecutive blocks of a request, as in Digest, and answer with their digests."""

    key: int
    op: int
    link: int
    number: int
    first_block: int
    filled: int
    strong: bytes


@dataclass(frozen=True, slots=True)
class Receive(Message):
    """Message ``number`` of ``link`` into consecutive blocks of a reservation, and answer with digests of them.

    What comes when the request holds these blocks no more is thrown away.
    """

    key: int
    op: int
    link: int
    number: int
    first_block: int
    filled: int
    strong: bytes


@dataclass(frozen=True, slots=True)
class Import(Message):
    """The first ``block_count`` blocks of a held request are valid: its own were written and verified. Answered by
    Written."""

    key: int
    op: int
    block_count: int


@dataclass(frozen=True, slots=True)
class ReadCached(Message):
    """The bytes of the leading ones of these names that are still in the prefix cache, whoever uses the blocks."""

    op: int
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Release(Message):
    """The front is done with the request, in whatever state; unknown keys are fine (it has ended by itself)."""

    key: int


@dataclass(frozen=True, slots=True)
class Abandon(Message):
    """Nobody waits for the Receive of this number any more: what comes for it is thrown away."""

    op: int


DeviceCommand = Attach | Detach | Pull | Abandon | Digest | Invite | Join | Leave | Send | Receive
Command = Reserve | Prefill | Decode | Write | Read | Import | ReadCached | Release | DeviceCommand

# --- engine to front --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading(Message):
    """Progress for people."""

    message: str


@dataclass(frozen=True, slots=True)
class LoadFailed(Message):
    error: BatonError


@dataclass(frozen=True, slots=True)
class Ready(Message):
    card: ModelCard
    stats: EngineStats
    is_shared: bool = False  # the descriptor of the pool's memory has been sent beside the channel
    device_pool: DevicePool | None = None  # a pool in GPU memory that others may map
    has_links: bool = False


@dataclass(frozen=True, slots=True)
class Admitted(Message):
    key: int
    cached_tokens: int
    computing: bool = False  # it has started by itself
    blocks: tuple[int, ...] = ()  # where in the pool its context will stand, if its front may touch it there


@dataclass(frozen=True, slots=True)
class Filled(Message):
    key: int
    blocks: FilledBlocks
    is_last: bool  # they end with the context; its first token may still be on its way


@dataclass(frozen=True, slots=True)
class First(Message):
    key: int
    first: FirstToken


@dataclass(frozen=True, slots=True)
class Streamed(Message):
    key: int
    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """This request has ended with an error and holds nothing any more."""

    key: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class Written(Message):
    op: int


@dataclass(frozen=True, slots=True)
class BlocksRead(Message):
    op: int
    payload: bytes

    def __reduce__(self) -> tuple[object, ...]:
        return (BlocksRead, (self.op, pickle.PickleBuffer(self.payload)))


@dataclass(frozen=True, slots=True)
class Answered(Message):
    """What a device command asked for: digests one after another, or an invitation."""

    op: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """A read, write or pull that was not done."""

    op: int
    error: BatonError


Event = Admitted | Filled | First | Streamed | Failed | Written | BlocksRead | Answered | Refused


@dataclass(frozen=True, slots=True)
class BlockReport(Message):
    """Blocks that were filled, and what has become of copies beside the steps; nothing else has happened since the last
    report."""

    events: tuple[Filled | Answered | Refused, ...]

    @classmethod
    def of(cls, events: Sequence[Event]) -> BlockReport | None:
        """None where one of the events is of another kind."""
        told = tuple(event for event in events if isinstance(event, Filled | Answered | Refused))
        return cls(told) if len(told) == len(events) else None


@dataclass(frozen=True, slots=True)
class Drawn(Message):
    """Requests that got one token and nothing else, which is nearly all of them nearly always.

    ``token_ids[i]`` is the token of ``keys[i]``: two flat tuples take a third of the time that pairs take.
    """

    keys: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport(Message):
    """Everything that happened since the last report: what a step brought for a key is in one of both."""

    drawn: Drawn
    events: tuple[Event, ...]
    stats: EngineStats
    change: BlockChange | None
