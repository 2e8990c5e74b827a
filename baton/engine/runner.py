"""The seam between scheduling and computing: parts of sequences in, drawn tokens out. No torch here.

``EngineCore`` decides (scheduler, block pool); a ``Runner`` computes. The real one is ``baton.engine.torch_runner``,
the torch-free twin for tests and demos ``baton.engine.fake``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import BatonError
from baton.core.types import ModelCard, Sampling, TokenLogprob


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


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's share of a step: compute ``context[start:]``, whose KV goes into ``blocks``.

    ``context`` holds every token of the sequence up to the end of this part; the KV of ``context[:start]`` is in
    ``blocks`` already. ``draw`` is None while more of the context is to come. With ``prompt_logprobs`` set, the result
    carries log-probabilities for ``targets``: target i is the token that follows row i (it may be shorter than the
    part: rows past the prompt's end have none).
    """

    context: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: Draw | None = None
    prompt_logprobs: int | None = None
    targets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a part yielded. ``error`` set: this sequence alone has failed (say, NaN logits); the others are sound."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: BatonError | None = None


class Runner(Protocol):
    """Owns the weights and the paged KV pool. Called from one thread only."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def total_blocks(self) -> int: ...

    def execute(self, parts: Sequence[Part]) -> list[PartResult]:
        """Run one step; results in the order of ``parts``. Never raises for one sequence's sake."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        """The blocks' KV bytes, concatenated, ``card.format.block_bytes`` each."""
        ...

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None: ...

    def close(self) -> None: ...
