"""The runner on the GPU: one step is computed while the next one is packed, planned and queued behind it.

A step of decode rows alone replays a captured graph; a step with prefill chunks is launched kernel by kernel. Drawn
tokens stay on the device as the next step's input and reach the host when the step is collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.core.clock import SystemClock
from baton.core.types import ModelCard
from baton.engine import kvcache
from baton.engine.cuda.attention_shape import ChunkTable, PageTable
from baton.engine.cuda.batch import Batch, PackedBatch
from baton.engine.cuda.copies import CudaCopies
from baton.engine.cuda.decoder import Attend, CudaDecoder, StepRows
from baton.engine.cuda.draft_rows import with_draft_rows
from baton.engine.cuda.flight import DrawnScores, Flight, PromptScores, Slot, alternatives
from baton.engine.cuda.graphs import DecodeStep
from baton.engine.cuda.prefill_attention import PrefillAttention
from baton.engine.cuda.sampler import DeviceSampler
from baton.engine.cuda.scores import SCORED_ROWS, indices, queue_scores
from baton.engine.cuda.step_arrays import Ints, StepArrays, StepLayout
from baton.engine.cuda.step_buffer import Copy, StepBuffer
from baton.engine.cuda.step_timer import StepTimer
from baton.engine.gpu import EnergyMeter, NoEnergy
from baton.engine.runner import Part, RunnerTimes, StepResult

STEPS_AHEAD = 1
LAYERS_BETWEEN_LOOKS = 4  # of a step that is launched kernel by kernel: a hand-over waits for some of them, not for all


def _no_copies(pool: torch.Tensor, streams: Sequence[torch.cuda.Stream]) -> None:
    """Other engines cannot copy from the pool."""


@dataclass(frozen=True, slots=True)
class Machinery:
    """All that computes a step, made once; see ``baton.engine.cuda.load``."""

    decoder: CudaDecoder
    steps: Mapping[int, DecodeStep]  # by bucket
    prefill: PrefillAttention
    sampler: DeviceSampler
    layout: StepLayout
    buffer: StepBuffer
    batch: Batch
    pool: torch.Tensor  # its last block is the one that padding attends to
    results: torch.Tensor  # int32 [2, rows]: the drawn tokens and the sampler's flags
    copy: Copy
    copies: Callable[[torch.Tensor, Sequence[torch.cuda.Stream]], CudaCopies | None] = _no_copies  # beside streams
    energy: EnergyMeter = field(default_factory=NoEnergy)


class CudaRunner:
    """Satisfies ``Runner``, one step ahead. Everything it touches in a step is allocated when it is built."""

    def __init__(self, machinery: Machinery, card: ModelCard, resources: ExitStack) -> None:
        """``resources`` are closed with the runner."""
        self._resources = resources
        self._machinery = machinery
        self._energy = machinery.energy  # what was used is told after the end, too
        self._card = card
        self._slots = [Slot(machinery.results, machinery.copy) for _ in range(STEPS_AHEAD + 1)]
        self._flights: deque[Flight] = deque()
        self._timer = StepTimer(SystemClock(), STEPS_AHEAD)
        self._launches = 0
        self._steps = torch.cuda.Stream()
        self._copies = torch.cuda.Stream()
        torch.cuda.synchronize()  # all was made on another stream
        self.copies = machinery.copies(machinery.pool[: self.total_blocks], (self._steps, self._copies))

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def total_blocks(self) -> int:
        return self._machinery.pool.shape[0] - 1

    @property
    def memory(self) -> None:
        """A pool on the GPU is not shared as memory of the host; see ``copies``."""
        return None

    @property
    def steps_ahead(self) -> int:
        return STEPS_AHEAD

    @property
    def times(self) -> RunnerTimes:
        return self._timer.times._replace(joules=self._energy.joules())

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part]) -> None:
        """See ``Runner.launch``."""
        m, launched = self._machinery, len(parts)
        parts = with_draft_rows(parts)
        slot = self._slots[self._launches % len(self._slots)]
        self._launches += 1
        slot.reuse()
        with torch.cuda.stream(self._steps):
            staged = m.buffer.stage()
            packed = m.batch.pack(parts, staged)
            prompts: list[PromptScores] = []
            drawn: DrawnScores | None = None
            if packed.whole:
                hidden, prompts = self._launch_whole(parts, packed, staged, slot)
                self._set_sampler(parts, packed)  # the device is at work by now
                if packed.logits:
                    drawn = self._score_drawn(parts, packed, self._draw(packed, hidden))
            else:
                self._set_sampler(parts, packed)
                drawn = self._score_drawn(parts, packed, self._launch_rows(packed, staged))
            self._timer.end()  # before what ``collect`` waits for, or the step's end could still be to come then
            slot.queue()
        self._flights.append(Flight(slot, parts, launched, packed, drawn, prompts))

    def while_waiting(self, look: Callable[[], None]) -> None:
        """See ``Runner.while_waiting``. Nobody looks without ``copies``: blocks are read between steps only then."""
        if self.copies is not None:
            self.copies.while_waiting(look)

    def has_filled(self) -> bool:
        """See ``Runner.has_filled``."""
        return bool(self._flights) and self._flights[0].slot.has_filled()

    def collect(self) -> StepResult:
        """See ``Runner.collect``."""
        slot = self._flights[0].slot
        with self._timer.waiting():
            if self.copies is not None:
                self.copies.wait(slot.done)
            slot.wait()
        return self._flights.popleft().land()  # not before: until then it is what ``has_filled`` speaks of

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""
        self._machinery.batch.forget(key)
        self._machinery.sampler.forget(key)

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        """See ``Runner.read_blocks``. Does not wait for the steps in flight."""
        with torch.cuda.stream(self._copies):
            return kvcache.read_blocks(self._machinery.pool[: self.total_blocks], blocks)

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        """See ``Runner.write_blocks``. Does not wait for the steps in flight; those launched later wait for it."""
        with torch.cuda.stream(self._copies):
            kvcache.write_blocks(self._machinery.pool[: self.total_blocks], blocks, payload)
        self._steps.wait_stream(self._copies)

    def close(self) -> None:
        """Wait for the device and give all memory back."""
        torch.cuda.synchronize()
        self._flights.clear()
        self._slots.clear()
        if self.copies is not None:
            self.copies.close()
        del self._machinery
        self._resources.close()
        torch.cuda.empty_cache()

    # --- a step -------------------------------------------------------------------------------------------------------

    def _set_sampler(self, parts: Sequence[Part], packed: PackedBatch) -> None:
        """Let the sampler know of the rows that are drawn from in another way than in the step before."""
        sampler = self._machinery.sampler
        for row, index in packed.changes:
            sampler.set_row(row, parts[index].key, parts[index].draw, parts[index].context)
        sampler.upload()

    def _launch_rows(self, packed: PackedBatch, staged: StepArrays[Ints]) -> torch.Tensor:
        """A step of decode rows alone, tokens drawn: logits [bucket, vocab]."""
        m = self._machinery
        step = m.steps[packed.bucket]
        step.plan(staged.row_pages[: packed.bucket + 1])
        m.buffer.upload(m.layout.decode_start, m.layout.block_ids_start + packed.blocks)
        self._timer.start()
        return step.replay()

    def _launch_whole(
        self, parts: Sequence[Part], packed: PackedBatch, staged: StepArrays[Ints], slot: Slot
    ) -> tuple[torch.Tensor, list[PromptScores]]:
        """A step with chunks, or with logits of all rows: the normed rows to draw from, and prompt scores."""
        m, arrays = self._machinery, self._machinery.buffer.arrays
        m.buffer.upload(0, m.layout.block_ids_start + packed.blocks)
        self._timer.start()
        count = packed.tokens
        rows = StepRows(
            arrays.token_ids[:count], arrays.sources[:count], arrays.positions[:count], arrays.slots[:count]
        )
        wanted = arrays.logit_rows[: packed.logits]
        attend = self._attend_whole(packed, staged, slot)
        asking = [index for index, part in enumerate(parts) if part.prompt_logprobs is not None and part.targets]
        if not asking:
            return m.decoder.wanted_hidden(rows, wanted, m.pool, attend), []
        hidden = m.decoder.hidden(rows, m.pool, attend)
        prompts = [scored for index in asking for scored in self._score_prompt(index, parts[index], packed, hidden)]
        return hidden[wanted.to(torch.int64)], prompts

    def _draw(self, packed: PackedBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Draw what follows the normed rows ``hidden``: their logits [rows, vocab]."""
        m = self._machinery
        drawn, flags = m.results
        logits = m.decoder.logits(hidden)
        m.sampler.sample(logits, m.buffer.arrays.logit_positions, packed.logits, drawn, flags)
        return logits

    def _plan_whole(self, packed: PackedBatch, staged: StepArrays[Ints]) -> None:
        """Cut up the attention of a step with chunks."""
        m = self._machinery
        if packed.rows:
            m.steps[packed.bucket].plan(staged.row_pages[: packed.bucket + 1])
        if packed.chunks:
            m.prefill.plan(list(_chunk_tables(staged, packed)), list(_chunk_tables(m.buffer.arrays, packed)))

    def _attend_whole(self, packed: PackedBatch, staged: StepArrays[Ints], slot: Slot) -> Attend:
        """Attention of a step with chunks: the decode rows first, since their padding spills into the chunks' rows.

        It is planned when the first layer comes to it: until then the device has something to do.
        """
        m = self._machinery
        activations = m.decoder.activations.first(packed.tokens)
        q = activations.qkv[packed.rows :, : m.decoder.spec.q_size]
        mixed = activations.mixed[packed.rows :]

        def attend(layer: int) -> None:
            if layer == m.decoder.spec.layers - 1:
                slot.mark_filled()  # a layer's KV is written before it is attended to
            if layer == 0:
                self._plan_whole(packed, staged)
            elif layer % LAYERS_BETWEEN_LOOKS == 0 and self.copies is not None:
                self.copies.look()
            if packed.rows:
                m.steps[packed.bucket].attend(layer)
            if packed.chunks:
                m.prefill.run(layer, q, mixed)

        return attend

    # --- log-probabilities --------------------------------------------------------------------------------------------

    def _score_prompt(
        self, index: int, part: Part, packed: PackedBatch, hidden: torch.Tensor
    ) -> Iterator[PromptScores]:
        """In pieces, since the logits of a whole chunk would not fit beside the KV pool."""
        decoder, first = self._machinery.decoder, int(packed.first_row[index])
        step = min(SCORED_ROWS, decoder.logit_rows)
        for start in range(0, len(part.targets), step):
            targets = part.targets[start : start + step]
            logits = decoder.logits(hidden[first + start :][: len(targets)])
            rows, token_ids = indices(range(len(targets)), logits.device), indices(targets, logits.device)
            yield PromptScores(index, targets, queue_scores(logits, rows, token_ids, part.prompt_logprobs or 0))

    def _score_drawn(self, parts: Sequence[Part], packed: PackedBatch, logits: torch.Tensor) -> DrawnScores | None:
        """What was drawn from ``logits``, for the parts that ask."""
        asking = [index for index, part in enumerate(parts) if alternatives(part) is not None]
        if not asking:
            return None
        rows = indices(packed.logit_row[asking].tolist(), logits.device)
        most = max(alternatives(parts[index]) or 0 for index in asking)
        return DrawnScores(asking, queue_scores(logits, rows, self._machinery.results[0][rows], most))


def _chunk_tables(arrays: StepArrays[Any], packed: PackedBatch) -> Iterator[ChunkTable[Any]]:
    """The chunks' part of the arrays, on the host or on the device, group by group."""
    first = 0
    for index, (window, chunks) in enumerate(packed.groups):
        last = first + chunks
        pages = PageTable(
            arrays.chunk_pages[first : last + 1],
            arrays.block_ids[packed.chunk_blocks : packed.blocks],
            arrays.chunk_last_page[first:last],
        )
        yield ChunkTable(arrays.chunk_starts[first + index : last + index + 1], pages, window)
        first = last
