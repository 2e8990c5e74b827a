"""The seam between scheduling and computing: parts of sequences in, drawn tokens out. No torch here.

``EngineCore`` decides (scheduler, block pool); a ``Runner`` computes. A step is launched, then collected. A runner that
takes ``steps_ahead`` 1 is given the next step while one is still being computed: a sequence whose token is being drawn
goes on from that token before anybody has seen it. A part may carry drafts, guesses of what follows its last token:
they are checked in the same step, and each that is right saves one. The runner on the CPU is
``baton.engine.torch_runner``, the torch-free twin for tests and demos ``baton.engine.fake``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.core.errors import BatonError
from baton.core.types import ModelCard, Sampling, TokenLogprob
from baton.engine.device_copies import DeviceCopies
from baton.engine.sharedpool import PoolMemory


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token that follows a part's last row.

    Drawing is a pure function of (seed, position, logits); ``prompt_length`` splits the context into prompt and output
    for the penalties; ``forbidden`` ids have probability zero (EOS and stop ids before min_tokens).
    """

    sampling: Sampling
    prompt_length: int
    forbidden: tuple[int, ...] = ()
    logprobs: int | None = None


class Part(NamedTuple):
    """One sequence's share of a step: compute rows [start, end) of its context, whose KV goes into ``blocks``.

    The KV of ``context[:start]`` is in ``blocks``, or will be when the steps launched before have been computed.
    ``context`` and ``blocks`` are the sequence's own lists and change after the launch. ``context`` holds prompt and
    output as far as they are known: at least ``end`` tokens, or ``end - 1`` when the last one is what the step launched
    just before draws for the same ``key``.
    """

    key: int  # names the sequence for as long as it lives in the engine
    context: Sequence[int]
    start: int
    end: int
    blocks: Sequence[int]
    draw: Draw | None = None  # None while more of the context is to come
    prompt_logprobs: int | None = None  # set: the result carries log-probabilities of ``targets``, so many alternatives
    targets: Sequence[int] = ()  # target i is the token that follows row i; rows past the prompt's end have none
    window: int | None = None  # tokens that a row sees at most, itself included; only where the card has the module
    drafts: tuple[int, ...] = ()  # only of a part that is one row, whose token is known, and that draws


class DrawnToken(NamedTuple):
    """``logprob`` is there when the draw asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PartDetail:
    """What a part yielded besides a token. ``error`` set: this sequence alone has failed (say, NaN logits).

    ``drawn`` is all that a part with drafts drew: the token after its row and, as long as the token before it is equal
    to its draft, the one after each draft; so one token at least, and one more than there are drafts at most. A token
    that cannot be drawn after a right draft ends them; it fails the sequence when it comes to be the first.
    """

    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: BatonError | None = None
    drawn: tuple[DrawnToken, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's results by the index of the part. ``token_ids`` has None for parts that drew nothing, failed, or have
    drafts; ``details`` has entries only for parts that have any, and for all that have drafts."""

    token_ids: Sequence[int | None]
    details: Mapping[int, PartDetail]


class RunnerTimes(NamedTuple):
    """Seconds since the runner was made, of the steps that were collected; and what its GPU has used since."""

    waited: float = 0.0  # in ``collect``, for the device
    device: float = 0.0  # of steps on the device
    device_idle: float = 0.0  # before steps that were launched when another one was still in flight
    joules: float = 0.0  # of the whole GPU, where it counts them


def no_look() -> None:
    """What a runner looks at until ``while_waiting`` says otherwise."""


class Runner(Protocol):
    """Owns the weights and the paged KV pool. Called from one thread only."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def total_blocks(self) -> int: ...

    @property
    def memory(self) -> PoolMemory | None:
        """The pool's memory, if it can be shared with other processes of this host. No step in flight may touch a
        block that is filled through it."""
        ...

    @property
    def copies(self) -> DeviceCopies | None:
        """What copies blocks on the device beside the steps, where the pool is on one."""
        ...

    @property
    def steps_ahead(self) -> int:
        """Steps that may be in flight when another one is launched: 0 or 1."""
        ...

    @property
    def times(self) -> RunnerTimes:
        """All zero where the host itself computes the steps."""
        ...

    def launch(self, parts: Sequence[Part]) -> None:
        """Queue one step, in the order of launches. Copies all that it needs of ``parts``, and waits for no device; a
        runner on a CPU may compute the step's KV here, and then reads ``parts`` again when it is collected.

        Each draft is one more row, at the positions that follow, with its KV in the part's blocks. Drawing is as if the
        drafts were known tokens. A part with drafts is not followed by another one of its key before it is collected.
        """
        ...

    def while_waiting(self, look: Callable[[], None]) -> None:
        """Have ``look`` called now and then while a step is launched, computed or waited for, in the caller's thread.

        It may begin copies and ask ``has_filled``; it launches and collects nothing.
        """
        ...

    def has_filled(self) -> bool:
        """Whether all KV of the oldest launched step is in its blocks; logits and draws come after it. False where that
        is not known before the step's end."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its results. Never raises for one sequence's sake.

        What a part yields that goes on from a token of a failed part means nothing, and must not fail the step.
        """
        ...

    def forget(self, key: int) -> None:
        """The sequence has ended or lost its blocks. Parts of it may be in flight, whose results still count; a part
        launched later under the same key starts anew, with all of its context known."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        """The blocks' KV bytes, concatenated, ``card.format.block_bytes`` each; of rows in flight none need be seen."""
        ...

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        """Fill blocks that no step in flight touches; steps launched later see it."""
        ...

    def close(self) -> None: ...
