"""A device sampler with sequences in its rows, and what the CPU draws from the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baton.core.types import Sampling
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.sampler import DeviceSampler
from baton.engine.runner import Draw
from baton.engine.sampler import Row, sample

DEVICE = torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32


UNTOUCHED = -7


def normal(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """On the CPU: both samplers are given copies."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Trial:
    """A sampler with its outputs, and the sequences that sit in its rows."""

    library: CudaLibrary
    vocab: int
    rows: int
    sampler: DeviceSampler = field(init=False)

    def __post_init__(self) -> None:
        self.sampler = DeviceSampler(self.library, self.vocab, self.rows, DEVICE)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.full((self.rows,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        return tokens, tokens.clone()

    def draw(self, logits: torch.Tensor, queries: Sequence[Row], first_key: int = 0) -> tuple[list[int], list[int]]:
        """Tokens and flags of as many rows as there are queries, each of a sequence never seen before."""
        for row, query in enumerate(queries):
            self.sampler.forget(first_key + row)
            self.sampler.set_row(row, first_key + row, query.draw, query.context)
        self.sampler.upload()
        tokens, flags = self.outputs()
        positions = torch.tensor([len(query.context) - 1 for query in queries], dtype=torch.int32, device=DEVICE)
        self.sampler.sample(logits.to(DEVICE), positions, len(queries), tokens, flags)
        return tokens.tolist()[: len(queries)], flags.tolist()[: len(queries)]


def expected(logits: torch.Tensor, queries: Sequence[Row]) -> list[int | None]:
    """What the CPU draws from the same values; None for a row that is not finite."""
    return [result.token_id for result in sample(logits.float(), queries)]


def queries_of(samplings: Sequence[Sampling], length: int = 3) -> list[Row]:
    return [Row(Draw(sampling, prompt_length=1), list(range(length))) for sampling in samplings]
