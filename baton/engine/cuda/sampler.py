"""Draws on the GPU, with the semantics of ``baton.engine.sampler``: one launch, behind or inside a captured graph.

A token is a pure function of (seed, position, logits). Weights are float32 exponentials rounded to multiples of 2^-43
of the largest, and their sums are exact, so no batch, grid or order changes a draw. It is the same draw as the CPU's,
unless the random number falls within rounding (some 1e-8 of the whole) of the border between two tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary, stream_lookup
from baton.engine.cuda.sampling_rows import COUNT, Bytes, Round, SamplingRows
from baton.engine.runner import Draw

SOUND, NOT_FINITE, TOO_MANY_EDITS = 0, 1, 2  # flags
MAX_EDITS = 2048  # biased and forbidden tokens of one row
STAGED_TOKENS = 1 << 18  # of contexts that are counted at once
MAX_BLOCKS_PER_ROW = 8
TILE = 1024  # logits that a warp reads before it moves on
WARPS = 16  # of a block

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class DeviceSampler:
    """Draws for up to ``max_rows`` rows; everything it touches is allocated here, and nothing afterwards.

    The step launched last need not have been read by the host: positions come from the device, and so do the tokens
    that penalties count. A call per step: ``set_row`` for rows whose sequence or ``Draw`` has changed, ``upload``, and
    ``sample`` (or the replay of a graph that captured it). The counts take 4 bytes * max_rows * vocab_size.
    """

    def __init__(self, library: CudaLibrary, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._sample = library.declare(
            "baton_sample", [_POINTER, *[_INT] * 6, _POINTER, _INT, *[_POINTER] * 5, _INT, _POINTER]
        )
        self._count = library.declare("baton_count_contexts", [_POINTER, _INT, *[_POINTER] * 2, _INT, _INT, _POINTER])
        self._stream = stream_lookup(device)
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._stride = -(-vocab_size // 128) * 128
        self._rows = SamplingRows(vocab_size, max_rows, MAX_EDITS)
        self._table = Staging(self._rows.table_bytes, device)
        self._contexts = Staging(max_rows * COUNT.itemsize + STAGED_TOKENS * 4, device)
        self._counts = torch.zeros(max_rows, self._stride, dtype=torch.int32, device=device)
        self._seen = torch.zeros(max_rows, self._stride // 32, dtype=torch.int32, device=device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        library.declare("baton_sampling_prepare", [_INT, _INT])(vocab_size, self._stride)

    def set_row(self, row: int, key: int, draw: Draw | None, context: Sequence[int]) -> None:
        """From the next ``upload`` on, row ``row`` draws for sequence ``key`` as ``draw`` says; None: not at all.

        A row stays as it is set, so in steady decoding nothing is set; one whose sequence moves to another row, or
        whose forbidden tokens change (min_tokens is reached), is set again. With penalties, the tokens of ``context``
        are counted once, when the key is first set; later tokens are counted on the device as they are drawn, so one in
        flight is counted exactly once even though ``context`` lacks it. ``context`` is read by the next ``upload``.
        A row with more than MAX_EDITS biased and forbidden tokens draws token 0 and the flag TOO_MANY_EDITS.
        """
        self._rows.set_row(row, key, draw, context)

    def forget(self, key: int) -> None:
        """The sequence has ended or was preempted. If it comes back, its whole context is counted again."""
        self._rows.forget(key)

    def upload(self) -> None:
        """Make what was set hold for the steps queued from now on.

        Queues one copy if something was set, and one more with a launch if contexts are to be counted; else nothing.
        """
        if not self._rows.is_changed:
            return
        for batch in self._rows.rounds(STAGED_TOKENS):
            self._count_contexts(batch)
        self._table.send(self._rows.pack(self._table.take()))

    def sample(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        rows: int,
        out_tokens: torch.Tensor,
        out_flags: torch.Tensor,
        overlap: Overlap = Overlap.NO,
    ) -> None:
        """Draw for rows 0 .. ``rows`` - 1 of ``logits`` [.., vocab], bf16 or float32, contiguous in each row.

        ``positions`` int32: the position of the token fed in, so that the one drawn has the next; negative: the row
        draws nothing. ``out_tokens`` and ``out_flags`` int32 [max_rows]: the token, and SOUND, NOT_FINITE or
        TOO_MANY_EDITS (the token is then 0). Rows that draw nothing leave both as they were. One launch, no allocation:
        can be captured for a fixed ``rows``. With ``overlap`` the operation before must be a kernel.
        """
        self._sample(
            logits.data_ptr(),
            int(logits.dtype == torch.float32),
            logits.stride(0),
            self._vocab_size,
            self._stride,
            rows,
            self._blocks_per_row(rows),
            self._table.device.data_ptr(),
            self._max_rows,
            self._counts.data_ptr(),
            self._seen.data_ptr(),
            positions.data_ptr(),
            out_tokens.data_ptr(),
            out_flags.data_ptr(),
            int(overlap),
            self._stream(),
        )

    def _blocks_per_row(self, rows: int) -> int:
        """Few rows are spread over several blocks, two for each multiprocessor; it does not change what is drawn."""
        tiles = -(-self._vocab_size // TILE)
        blocks = MAX_BLOCKS_PER_ROW
        while blocks > 1 and (rows * blocks > 2 * self._multiprocessors or blocks * WARPS >= 2 * tiles):
            blocks //= 2
        return blocks

    def _count_contexts(self, batch: Round) -> None:
        table = self._contexts.take()
        tokens_start = batch.parts.nbytes
        used = tokens_start + batch.tokens.nbytes
        table[:tokens_start] = batch.parts.view(np.uint8)
        table[tokens_start:used] = batch.tokens.view(np.uint8)
        self._contexts.send(used)
        self._count(
            self._contexts.device.data_ptr(),
            len(batch.parts),
            self._counts.data_ptr(),
            self._seen.data_ptr(),
            self._vocab_size,
            self._stride,
            self._stream(),
        )


class Staging:
    """A device buffer and two pinned ones to fill it from, used in turn: one is written while the other is copied."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._views: list[Bytes] = [buffer.numpy() for buffer in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def take(self) -> Bytes:
        """The buffer to write next. Waits only if its last copy, two sends ago, has not ended."""
        self._copied[self._turn].synchronize()
        return self._views[self._turn]

    def send(self, used: int) -> None:
        """Queue the copy of the first ``used`` bytes of what ``take`` gave."""
        self.device[:used].copy_(self._pinned[self._turn][:used], non_blocking=True)
        self._copied[self._turn].record()
        self._turn = 1 - self._turn
