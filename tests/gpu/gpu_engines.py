"""Runners on the GPU over small models, and made-up sequences to drive them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from baton.engine.config import EngineConfig
from baton.engine.cuda.runner import CudaRunner
from baton.engine.load import build_runner
from baton.engine.spec import DecoderSpec
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from bench.cuda_logits import Line, step
from bench.forced_tokens import DecoderLogits
from tests.goldens import DATA, TINY

DEVICE = torch.device("cuda")
BLOCK = 16
MODELS = (*(str(path) for path in TINY), "random:smollm2-135m")
PLAIN = str(DATA / "tiny" / "llama-gqa-untied")


@contextmanager
def cuda_runner(model: str, **changes: object) -> Iterator[CudaRunner]:
    settings = {"kv_blocks": 256, "max_step_tokens": 256, "max_running": 24, "max_waiting": 64} | changes
    runner = cast(CudaRunner, build_runner(EngineConfig(model, device="cuda", **settings)))  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.close()


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


class Reference:
    """``TorchDecoder`` on the GPU, whole contexts at a time."""

    def __init__(self, model: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        self.spec: DecoderSpec = load_spec(model)
        decoder = TorchDecoder(self.spec, load_weights(model, self.spec, dtype, DEVICE), dtype)
        self._logits = DecoderLogits(decoder, DEVICE, kv_dtype)

    def logits(self, tokens: Sequence[int], window: int | None = None) -> torch.Tensor:
        """float32 [tokens, vocab]."""
        return self._logits.rows(tokens, 0, window)
