"""Runners on the GPU over small models, and made-up sequences to drive them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch

from baton.core.types import Sampling
from baton.engine.config import EngineConfig
from baton.engine.cuda.decoder import StepRows
from baton.engine.cuda.runner import CudaRunner
from baton.engine.decoder import PackedStep
from baton.engine.kvcache import allocate_pool
from baton.engine.load import build_runner
from baton.engine.runner import Draw, Part, StepResult
from baton.engine.spec import DecoderSpec
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from tests.goldens import DATA, TINY

DEVICE = torch.device("cuda")
BLOCK = 16
MODELS = (*(str(path) for path in TINY), "random:smollm2-135m")
PLAIN = str(DATA / "tiny" / "llama-gqa-untied")
GREEDY = Sampling()


@contextmanager
def cuda_runner(model: str, **changes: object) -> Iterator[CudaRunner]:
    settings = {"kv_blocks": 256, "max_step_tokens": 256, "max_running": 24, "max_waiting": 64} | changes
    runner = cast(CudaRunner, build_runner(EngineConfig(model, device="cuda", **settings)))  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.close()


@dataclass
class Line:
    """A sequence: its tokens as far as the host knows them, and how many of them are computed or on their way."""

    key: int
    tokens: list[int]
    blocks: list[int]
    draw: Draw = field(default_factory=lambda: Draw(GREEDY, 1))
    computed: int = 0
    in_flight: int = 0

    def part(self, rows: int) -> Part:
        """The next ``rows`` rows. Draws when they end the context."""
        start, end = self.computed, self.computed + rows
        self.computed = end
        draws = end == len(self.tokens) + self.in_flight
        self.in_flight += draws
        return Part(self.key, self.tokens, start, end, self.blocks, self.draw if draws else None)

    def take(self, token_id: int | None) -> None:
        """The token of a part that drew has arrived."""
        assert token_id is not None
        self.in_flight -= 1
        self.tokens.append(token_id)


def lines(lengths: Sequence[int], vocab_size: int, *, room: int = 64, seed: int = 0, keys: int = 0) -> list[Line]:
    """Random prompts of these lengths with blocks of their own, scattered over the pool."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(length + room) // BLOCK) for length in lengths]
    shuffled = torch.randperm(sum(counts), generator=generator).tolist()
    made: list[Line] = []
    for key, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        made.append(Line(keys + key, tokens, [shuffled.pop() for _ in range(count)]))
    return made


def step(runner: CudaRunner, parts: Sequence[Part]) -> StepResult:
    runner.launch(parts)
    return runner.collect()


def prefill(runner: CudaRunner, made: Sequence[Line]) -> None:
    """Compute the prompts, each in one step, and take the first tokens."""
    for line in made:
        line.take(step(runner, [line.part(len(line.tokens))]).token_ids[0])


def decode_lockstep(runner: CudaRunner, made: Sequence[Line], steps: int) -> None:
    """Each step is launched when the tokens of the one before are known."""
    for _ in range(steps):
        result = step(runner, [line.part(1) for line in made])
        for line, token_id in zip(made, result.token_ids, strict=True):
            line.take(token_id)


def decode_ahead(runner: CudaRunner, made: Sequence[Line], steps: int) -> None:
    """Each step is launched while the one before is computed."""
    runner.launch([line.part(1) for line in made])
    for index in range(steps):
        if index + 1 < steps:
            runner.launch([line.part(1) for line in made])
        for line, token_id in zip(made, runner.collect().token_ids, strict=True):
            line.take(token_id)


@torch.inference_mode()
def all_logits(runner: CudaRunner, parts: Sequence[Part]) -> torch.Tensor:
    """float32 logits of every row of an eager step, part by part."""
    m = runner._machinery
    with torch.cuda.stream(runner._steps):
        staged = m.buffer.stage()
        packed = m.batch.pack([part._replace(prompt_logprobs=0) for part in parts], staged)
        m.buffer.upload(0, m.layout.block_ids_start + packed.blocks)
        runner._plan_whole(packed, staged)
        arrays, count = m.buffer.arrays, packed.tokens
        rows = StepRows(
            arrays.token_ids[:count], arrays.sources[:count], arrays.positions[:count], arrays.slots[:count]
        )
        hidden = m.decoder.hidden(rows, m.pool, runner._attend_whole(packed)).clone()
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
        rows = torch.from_numpy(packed.logit_row).long().to(DEVICE)
        eager = decode.launch()[rows]
        replayed = decode.replay()[rows]
        drawn = replayed.float().argmax(dim=-1).int()
        m.results[0][rows] = drawn
    torch.cuda.synchronize()
    for line, token_id in zip(made, drawn.tolist(), strict=True):
        line.take(token_id)
    return eager, replayed


class Reference:
    """``TorchDecoder`` on the GPU, whole contexts at a time."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        self.spec: DecoderSpec = load_spec(model)
        self._decoder = TorchDecoder(self.spec, load_weights(model, self.spec, dtype, DEVICE), dtype)
        self._dtype = dtype

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab]."""
        count = len(tokens)
        blocks = -(-count // BLOCK)
        pool = allocate_pool(self.spec, blocks, BLOCK, self._dtype, DEVICE)
        return self._decoder.forward(
            PackedStep(
                token_ids=torch.tensor(tokens, dtype=torch.int32),
                positions=torch.arange(count, dtype=torch.int32),
                seq_starts=torch.tensor([0, count], dtype=torch.int32),
                block_tables=torch.arange(blocks, dtype=torch.int32)[None],
                logit_rows=torch.arange(count, dtype=torch.int32),
            ),
            pool,
        )


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||; NaN never passes a comparison."""
    return float(torch.linalg.vector_norm(found.float() - wanted.float()) / torch.linalg.vector_norm(wanted.float()))
