"""The real runner: packs the parts of a step, has a ``Decoder`` compute them, draws tokens from the logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from baton.core.types import ModelCard
from baton.engine import kvcache
from baton.engine.decoder import UNLIMITED, Decoder, PackedStep
from baton.engine.device_copies import DeviceCopies
from baton.engine.runner import DrawnToken, Part, PartDetail, RunnerTimes, StepResult, no_look
from baton.engine.sampler import Row, Sample, logprob_of, sample
from baton.engine.sharedpool import PoolMemory


class _Flight(NamedTuple):
    """A step whose KV is written (on a GPU: queued). ``wanted``: the rows of each part that ``logits`` are of."""

    parts: Sequence[Part]
    wanted: Sequence[range]
    logits: Callable[[], torch.Tensor]


class TorchRunner:
    """Satisfies ``Runner`` over any ``Decoder`` and a pool from ``kvcache.allocate_pool``.

    A launch computes the step's KV, at once; logits and draws follow when it is collected.
    """

    steps_ahead = 0
    times = RunnerTimes()

    def __init__(
        self,
        decoder: Decoder,
        pool: torch.Tensor,
        card: ModelCard,
        memory: PoolMemory | None = None,
        copies: DeviceCopies | None = None,
    ) -> None:
        """``memory``: that of ``pool``, if it can be shared; ``copies``: over ``pool``, if it is on a GPU."""
        self._decoder = decoder
        self._pool = pool
        self._card = card
        self.memory = memory
        self.copies = copies
        self._flights: deque[_Flight] = deque()
        self._look: Callable[[], None] = no_look

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def total_blocks(self) -> int:
        return int(self._pool.shape[0])

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part]) -> None:
        wanted = [_wanted_rows(part) for part in parts]
        self._flights.append(_Flight(parts, wanted, self._decoder.fill(_pack(parts, wanted), self._pool)))

    def while_waiting(self, look: Callable[[], None]) -> None:
        self._look = look

    def has_filled(self) -> bool:
        return bool(self._flights) and self._pool.device.type == "cpu"  # on a GPU it has only been queued

    @torch.inference_mode()
    def collect(self) -> StepResult:
        if self.copies is None:  # they would allocate what kernels that are queued on this stream may still use
            self._look()
        flight = self._flights.popleft()
        result = _read(flight.logits(), flight.parts, flight.wanted)
        if self.copies is not None:  # they do not wait for steps, and not every step's results did
            torch.cuda.current_stream(self._pool.device).synchronize()
        return result

    def forget(self, key: int) -> None:
        """Nothing is kept by sequence."""

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        return kvcache.read_blocks(self._pool, blocks)

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        kvcache.write_blocks(self._pool, blocks, payload)

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()
        del self._pool
        if self.memory is not None:
            self.memory.close()


def _wanted_rows(part: Part) -> range:
    """The rows of the part, counted from its first, whose logits are needed: a suffix or a prefix of it, or all."""
    length = part.end - part.start
    if part.prompt_logprobs is None:
        return range(length - 1, length + len(part.drafts)) if part.draw is not None else range(0)
    return range(length if part.draw is not None else len(part.targets))


def _pack(parts: Sequence[Part], wanted: Sequence[range]) -> PackedStep:
    lengths = np.fromiter((part.end + len(part.drafts) - part.start for part in parts), np.int32, len(parts))
    starts = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    tokens = np.empty(starts[-1], np.int32)
    positions = np.empty(starts[-1], np.int32)
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int32)
    rows: list[int] = []
    for index, part in enumerate(parts):
        first, last = starts[index], starts[index + 1]
        tokens[first:last] = [*part.context[part.start : part.end], *part.drafts]
        positions[first:last] = np.arange(part.start, part.end + len(part.drafts), dtype=np.int32)
        tables[index, : len(part.blocks)] = part.blocks
        rows += [int(first) + row for row in wanted[index]]
    return PackedStep(
        token_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        seq_starts=torch.from_numpy(starts),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.tensor(rows, dtype=torch.int32),
        windows=_windows(parts),
    )


def _windows(parts: Sequence[Part]) -> torch.Tensor | None:
    if all(part.window is None for part in parts):
        return None
    return torch.tensor([UNLIMITED if part.window is None else part.window for part in parts], dtype=torch.int32)


def _read(logits: torch.Tensor, parts: Sequence[Part], wanted: Sequence[range]) -> StepResult:
    """Draw for the parts that ask for it, and attach the prompt's log-probabilities."""
    first, offsets = 0, []
    for rows in wanted:
        offsets.append(first)
        first += len(rows)
    drawing = [index for index, part in enumerate(parts) if part.draw is not None and not part.drafts]
    last_rows = [offsets[index] + len(wanted[index]) - 1 for index in drawing]
    queries = [Row(part.draw, part.context) for part in parts if part.draw is not None and not part.drafts]
    chosen = logits if len(last_rows) == logits.shape[0] else logits[last_rows]
    drawn = dict(zip(drawing, sample(chosen, queries), strict=True))
    details: dict[int, PartDetail] = {}
    for index, part in enumerate(parts):
        result = drawn.get(index, Sample())
        if result.error is not None or result.logprob is not None or part.prompt_logprobs is not None:
            details[index] = _detail(result, part, logits[offsets[index] :])
        elif part.drafts:
            details[index] = _verified(part, logits[offsets[index] :])
    return StepResult([drawn[index].token_id if index in drawn else None for index in range(len(parts))], details)


def _verified(part: Part, logits: torch.Tensor) -> PartDetail:
    """Draw after the part's row and after each draft that is right; ``logits`` [1 + drafts or more, vocab]."""
    assert part.draw is not None
    drawn: list[DrawnToken] = []
    context = list(part.context[: part.end])
    for row in range(len(part.drafts) + 1):
        result = sample(logits[row : row + 1], [Row(part.draw, context)])[0]
        if result.token_id is None:
            return PartDetail(drawn=tuple(drawn), error=None if drawn else result.error)
        drawn.append(DrawnToken(result.token_id, result.logprob))
        if (result.token_id,) != part.drafts[row : row + 1]:
            break
        context.append(result.token_id)
    return PartDetail(drawn=tuple(drawn))


def _detail(result: Sample, part: Part, logits: torch.Tensor) -> PartDetail:
    if result.error is not None or part.prompt_logprobs is None:
        return PartDetail(result.logprob, error=result.error)
    top = part.prompt_logprobs
    scores = tuple(logprob_of(logits[row], target, top) for row, target in enumerate(part.targets))
    return PartDetail(result.logprob, scores)
