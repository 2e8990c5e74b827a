"""Logits of a model that is made to follow given tokens, by different ways to compute, and how far they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.engine.cuda.runner import CudaRunner
from baton.engine.decoder import Decoder, PackedStep
from baton.engine.kvcache import allocate_pool
from bench.cuda_logits import Line, all_logits, decode_logits, prefill

BLOCK = 16
BATCH = 24  # lines that decode together


class Case(Protocol):
    """A prompt and the output that is to follow it."""

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def output(self) -> tuple[int, ...]: ...


class LogitSource(Protocol):
    def rows(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        """float32 [len(tokens) - first, vocab]: the logits after token ``first`` and after each one behind it."""
        ...


class DecoderLogits:
    """Of any ``Decoder``, each context in one step over a pool of its own."""

    def __init__(self, decoder: Decoder, device: torch.device, kv_dtype: torch.dtype | None = None) -> None:
        """``kv_dtype`` None: as the decoder."""
        self._decoder = decoder
        self._device = device
        self._kv_dtype = kv_dtype or decoder.dtype

    def rows(self, tokens: Sequence[int], first: int, window: int | None = None) -> torch.Tensor:
        """``window``: tokens that a row sees at most; None: as the model."""
        count = len(tokens)
        blocks = -(-count // BLOCK)
        step = PackedStep(
            token_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.arange(count, dtype=torch.int32),
            seq_starts=torch.tensor([0, count], dtype=torch.int32),
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            logit_rows=torch.arange(first, count, dtype=torch.int32),
            windows=None if window is None else torch.tensor([window], dtype=torch.int32),
        )
        return self._decoder.forward(
            step, allocate_pool(self._decoder.spec, blocks, BLOCK, self._kv_dtype, self._device)
        )


class CudaLogits:
    """Of the GPU's runner, each context in one step."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner

    def rows(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        line = _line(0, tokens, first_block=0, room=0)
        found = all_logits(self._runner, [line.part(len(tokens))])[first:]
        self._runner.forget(line.key)
        return found


class TransformersLogits:
    """Of Hugging Face transformers, each context in one call. ImportError where it is not installed."""

    def __init__(self, directory: str, dtype: torch.dtype, device: torch.device) -> None:
        import transformers  # pyright: ignore[reportMissingImports]

        transformers.logging.set_verbosity_error()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        return self._model(torch.tensor([tokens], device=self._device), use_cache=False).logits[0, first:].float()


def forced_chunks(source: LogitSource, cases: Sequence[Case]) -> torch.Tensor:
    """float32 [all output tokens, vocab], case by case: each case's prompt and output as one prompt."""
    rows = [source.rows([*case.prompt, *case.output[:-1]], len(case.prompt) - 1) for case in cases]
    return torch.cat(rows)


def forced_steps(runner: CudaRunner, cases: Sequence[Case]) -> tuple[torch.Tensor, list[int]]:
    """float32 logits of decode steps in batches, one token of each case a step, and the index of each row among those
    of ``forced_chunks``. The first token of a case is prefill's and not among them."""
    starts = [0]
    for case in cases:
        starts.append(starts[-1] + len(case.output))
    rows: list[torch.Tensor] = []
    places: list[int] = []
    for first in range(0, len(cases), BATCH):
        _decode_batch(runner, list(zip(starts, cases, strict=False))[first : first + BATCH], rows, places)
    return torch.cat(rows), places


def _decode_batch(
    runner: CudaRunner, batch: Sequence[tuple[int, Case]], rows: list[torch.Tensor], places: list[int]
) -> None:
    running: list[tuple[Line, int, Case]] = []
    block = 0
    for start, case in batch:
        line = _line(start, case.prompt, block, room=len(case.output))
        block += len(line.blocks)
        prefill(runner, [line])
        _force(runner, line, case.output[0])
        running.append((line, start, case))
    step = 1
    while running := [entry for entry in running if len(entry[2].output) > step]:
        rows.append(decode_logits(runner, [line for line, _, _ in running])[1].float())
        for line, start, case in running:
            _force(runner, line, case.output[step])
            places.append(start + step)
        step += 1


def _force(runner: CudaRunner, line: Line, token_id: int) -> None:
    """Put ``token_id`` in the place of the token drawn last, also on the device, which would take its own."""
    line.tokens[-1] = token_id
    runner.forget(line.key)


def _line(key: int, tokens: Sequence[int], first_block: int, room: int) -> Line:
    return Line(key, list(tokens), list(range(first_block, first_block + blocks_of(len(tokens) + room))))


def blocks_of(tokens: int) -> int:
    """Blocks of a line that grows to ``tokens`` tokens."""
    return -(-tokens // BLOCK)


# --- agreement --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Over output tokens, each after the given ones before it."""

    tokens: int
    same: float  # share whose likeliest token is the given one
    logprob: float  # of the given token, mean


def agreement(logits: torch.Tensor, wanted: Sequence[int]) -> Agreement:
    given = torch.tensor(wanted, device=logits.device)
    same = (logits.argmax(dim=-1) == given).float().mean()
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, given[:, None])
    return Agreement(len(wanted), round(float(same), 4), round(float(logprobs.mean()), 4))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||; NaN never passes a comparison."""
    return float(torch.linalg.vector_norm(found.float() - wanted.float()) / torch.linalg.vector_norm(wanted.float()))
