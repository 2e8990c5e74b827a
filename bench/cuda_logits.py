"""Logits of the GPU's runner, which hands out tokens only: of whole contexts, and of decode steps as their graphs run.

It reaches behind ``Runner``: nothing that serves requests needs logits.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baton.core.types import Sampling
from baton.engine.cuda.decoder import StepRows
from baton.engine.cuda.runner import CudaRunner
from baton.engine.runner import Draw, Part, StepResult

GREEDY = Sampling()


@dataclass
class Line:
    """A sequence: its tokens as far as the host knows them, and how many of them are computed or on their way."""

    key: int
    tokens: list[int]
    blocks: list[int]
    draw: Draw = field(default_factory=lambda: Draw(GREEDY, 1))
    computed: int = 0
    in_flight: int = 0
    window: int | None = None

    def part(self, rows: int) -> Part:
        """The next ``rows`` rows. Draws when they end the context."""
        start, end = self.computed, self.computed + rows
        self.computed = end
        draws = end == len(self.tokens) + self.in_flight
        self.in_flight += draws
        draw = self.draw if draws else None
        return Part(self.key, self.tokens, start, end, self.blocks, draw, window=self.window)

    def take(self, token_id: int | None) -> None:
        """The token of a part that drew has arrived."""
        assert token_id is not None
        self.in_flight -= 1
        self.tokens.append(token_id)


def step(runner: CudaRunner, parts: Sequence[Part]) -> StepResult:
    runner.launch(parts)
    return runner.collect()


def prefill(runner: CudaRunner, made: Sequence[Line]) -> None:
    """Compute the prompts, each in one step, and take the first tokens."""
    for line in made:
        line.take(step(runner, [line.part(len(line.tokens))]).token_ids[0])


@torch.inference_mode()
def all_logits(runner: CudaRunner, parts: Sequence[Part]) -> torch.Tensor:
    """float32 logits of every row of an eager step, part by part."""
    m = runner._machinery
    with torch.cuda.stream(runner._steps):
        staged = m.buffer.stage()
        packed = m.batch.pack([part._replace(prompt_logprobs=0) for part in parts], staged)
        m.buffer.upload(0, m.layout.block_ids_start + packed.blocks)
        arrays, count = m.buffer.arrays, packed.tokens
        rows = StepRows(
            arrays.token_ids[:count], arrays.sources[:count], arrays.positions[:count], arrays.slots[:count]
        )
        hidden = m.decoder.hidden(rows, m.pool, runner._attend_whole(packed, staged, runner._slots[0])).clone()
        pieces = [m.decoder.logits(piece).float() for piece in hidden.split(m.decoder.logit_rows)]
    torch.cuda.synchronize()
    logits, firsts = torch.cat(pieces), packed.first_row.tolist()
    return torch.cat([logits[first:][: part.end - part.start] for first, part in zip(firsts, parts, strict=True)])


@torch.inference_mode()
def decode_logits(runner: CudaRunner, made: Sequence[Line]) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 logits [lines, vocab] of one decode step: launched kernel by kernel, and by its graph.

    The likeliest token of each row counts as drawn.
    """
    m = runner._machinery
    with torch.cuda.stream(runner._steps):
        staged = m.buffer.stage()
        packed = m.batch.pack([line.part(1) for line in made], staged)
        m.buffer.upload(m.layout.decode_start, m.layout.block_ids_start + packed.blocks)
        decode = m.steps[packed.bucket]
        decode.plan(staged.row_pages[: packed.bucket + 1])
        rows = torch.from_numpy(packed.logit_row).long().to(m.pool.device)
        eager = decode.launch()[rows]
        replayed = decode.replay()[rows]
        drawn = replayed.float().argmax(dim=-1).int()
        m.results[0][rows] = drawn
    torch.cuda.synchronize()
    for line, token_id in zip(made, drawn.tolist(), strict=True):
        line.take(token_id)
    return eager, replayed
