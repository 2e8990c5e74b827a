"""The persistent decode batch: which sequence sits in which row, and the step's integers packed for one upload.

A sequence keeps its row for as long as it decodes, whatever order the scheduler names it in; when one leaves, the last
rows fill the hole. So a steady step is a few vectorised numpy operations, and what the device keeps by row (sampling
parameters, penalty counts, the drawn token) stays where it is. Pure numpy: no device is needed to pack a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton.engine.cuda.draft_rows import draft_key
from baton.engine.cuda.step_arrays import HOST, NOWHERE, BatchShape, Ints, StepArrays, aligned
from baton.engine.runner import Draw, Part

_UNLIMITED = 2**31 - 1  # as a window


class ChunkGroup(NamedTuple):
    """Chunks of a step that see equally far; they follow each other in the packed rows."""

    window: int | None  # tokens that a row sees at most, itself included
    chunks: int


class RowChange(NamedTuple):
    """Row ``row`` now belongs to the sequence of ``part``, or is to be drawn from in another way."""

    row: int
    part: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What one call of ``Batch.pack`` put into the arrays. Chunk rows follow the ``rows`` decode rows."""

    rows: int  # decode rows, not counting padding
    bucket: int  # decode rows, padded; 0 without any
    tokens: int  # rows of the step, not counting padding
    logits: int  # rows to draw from: the decode rows, then the chunks that end their context
    groups: tuple[ChunkGroup, ...]
    whole: bool  # the arrays of every row are filled: there are chunks, or logits of all rows are asked for
    draws_nothing: bool  # some part draws no token
    chunk_blocks: int  # where the chunks' part of ``block_ids`` begins
    blocks: int  # entries of ``block_ids`` in use
    logit_row: Ints  # [parts] where a part's token is drawn, or -1
    first_row: Ints  # [parts] the step's row at which each part begins
    changes: list[RowChange]

    @property
    def chunks(self) -> int:
        return sum(group.chunks for group in self.groups)


class _Columns(NamedTuple):
    """The parts of a step, field by field, in the order of ``Part``."""

    key: tuple[int, ...]
    context: tuple[Sequence[int], ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    blocks: tuple[Sequence[int], ...]
    draw: tuple[Draw | None, ...]
    prompt_logprobs: tuple[int | None, ...]
    targets: tuple[Sequence[int], ...]
    window: tuple[int | None, ...]
    drafts: tuple[tuple[int, ...], ...]


class Batch:
    """The rows of the step launched last, and the blocks of the sequences in them."""

    def __init__(self, shape: BatchShape) -> None:
        self._shape = shape
        rows = shape.rows
        self._table = np.full((rows, shape.blocks), shape.dummy_block, np.int32)
        self._columns = np.arange(shape.blocks, dtype=np.int32)
        self._numbers = np.arange(rows, dtype=np.int32)
        self._positions = np.zeros(rows, np.int32)  # by row, of the decode rows of the step before
        self._row_of: dict[int, int] = {}
        self._draws: list[Draw | None] = [None] * rows  # by row
        self._known_blocks = [0] * rows  # by row
        self._windows = np.full(rows, _UNLIMITED, np.int32)  # by row
        # Of the step before, by part; empty when the next step has to be arranged anew.
        self._steady_keys: tuple[int, ...] = ()
        self._steady_draws: tuple[Draw | None, ...] = ()
        self._steady_ends: tuple[int, ...] = ()
        self._steady_rows = self._numbers[:0]
        self._steady_blocks: list[int] = []

    def forget(self, key: int) -> None:
        """The rows of the sequence and its drafts are free; what is known of its blocks and its last token is void."""
        number = 0
        while self._row_of.pop(draft_key(key, number), None) is not None:
            self._steady_keys = ()
            number += 1

    def pad(self, bucket: int, out: StepArrays[Ints]) -> int:
        """Fill ``out`` with a decode batch of padding alone, to warm up with. Returns the block ids in use."""
        out.row_pages[0] = 0
        return self._pad_rows(0, bucket, 0, out)

    def pack(self, parts: Sequence[Part], out: StepArrays[Ints]) -> PackedBatch:
        """Fill ``out`` with the step's integers, those of ``StepArrays.token_ids`` and so on only where needed."""
        columns = _Columns(*zip(*parts, strict=True))
        if self._repeats(columns):
            return self._pack_repeated(columns, out)
        starts = np.array(columns.start, np.int32)
        lengths = np.array(columns.end, np.int32) - starts
        rows, changes = self._arrange(columns, lengths, out)
        count = int(np.count_nonzero(lengths == 1))
        bucket = self._shape.bucket(count)
        single = lengths == 1
        self._positions[rows[single]] = starts[single]
        used = self._fill_rows(count, bucket, out)
        first_row = rows.copy()
        chunks = self._grouped(columns, np.flatnonzero(~single).tolist())
        tokens, chunk_blocks, blocks = count, aligned(used), used
        whole = len(chunks) > 0 or columns.prompt_logprobs.count(None) < len(parts)
        if whole:
            tokens, blocks = self._fill_whole(columns, rows, chunks, count, chunk_blocks, first_row, out)
        logits = int(np.count_nonzero(rows >= 0))
        return PackedBatch(
            rows=count,
            bucket=bucket,
            tokens=tokens,
            logits=logits,
            groups=tuple(ChunkGroup(window, len(chunks[window])) for window in chunks),
            whole=whole,
            draws_nothing=None in columns.draw,
            chunk_blocks=chunk_blocks,
            blocks=blocks,
            logit_row=rows,
            first_row=first_row,
            changes=changes,
        )

    def _repeats(self, columns: _Columns) -> bool:
        """Every part is one row that goes on where the step before ended, drawn from in the same way."""
        return (
            columns.key == self._steady_keys
            and columns.draw == self._steady_draws
            and columns.start == self._steady_ends
            and sum(columns.end) - sum(columns.start) == len(columns.end)
            and columns.prompt_logprobs.count(None) == len(columns.end)
        )

    def _pack_repeated(self, columns: _Columns, out: StepArrays[Ints]) -> PackedBatch:
        """``pack`` where no row moves: all but the blocks follows from the step before."""
        rows = self._steady_rows
        count, bucket = len(rows), self._shape.bucket(len(rows))
        self._steady_ends = columns.end
        self._append_blocks(columns)
        out.row_sources[:count] = self._numbers[:count]  # each row feeds itself
        self._positions[:count] += 1
        used = self._fill_rows(count, bucket, out)
        return PackedBatch(
            rows=count,
            bucket=bucket,
            tokens=count,
            logits=count,
            groups=(),
            whole=False,
            draws_nothing=False,
            chunk_blocks=aligned(used),
            blocks=used,
            logit_row=rows,
            first_row=rows,
            changes=[],
        )

    # --- who sits where -----------------------------------------------------------------------------------------------

    def _arrange(self, columns: _Columns, lengths: Ints, out: StepArrays[Ints]) -> tuple[Ints, list[RowChange]]:
        """Give every part its row: those who decode keep theirs or fill holes, those who end their context follow."""
        sizes = lengths.tolist()
        singles = [part for part, size in enumerate(sizes) if size == 1]
        rows = self._place(columns, sizes, singles)
        old_row_of, old_draws = self._row_of, self._draws.copy()
        self._row_of = {}
        changes: list[RowChange] = []
        for part, row in enumerate(rows.tolist()):
            key, draw = columns.key[part], columns.draw[part]
            old = old_row_of.get(key, -1)
            if row < 0:
                continue
            self._row_of[key] = row
            if sizes[part] == 1:
                context, start = columns.context[part], columns.start[part]
                is_on_host = len(context) > start or old < 0 or old_draws[old] is None
                out.row_sources[row] = HOST if is_on_host else old
                out.row_token_ids[row] = context[start] if is_on_host else 0
            if old != row:
                self._set_blocks(row, 0, columns.blocks[part])
                self._windows[row] = self._window(columns.window[part]) or _UNLIMITED
            elif len(columns.blocks[part]) != self._known_blocks[row]:
                self._set_blocks(row, self._known_blocks[row], columns.blocks[part])
            if old != row or draw is not old_draws[row]:
                changes.append(RowChange(row, part))
            self._draws[row] = draw
        is_steady = len(singles) == len(sizes) and None not in columns.draw and not any(columns.drafts)
        self._remember(columns, rows, is_steady=is_steady)
        return rows, changes

    def _place(self, columns: _Columns, sizes: list[int], singles: list[int]) -> Ints:
        rows = np.full(len(sizes), -1, np.int32)
        count = len(singles)
        free = set(range(count))
        newcomers: list[int] = []
        for part in singles:
            row = self._row_of.get(columns.key[part], -1)
            if 0 <= row < count:
                rows[part] = row
                free.discard(row)
            else:
                newcomers.append(part)
        rows[newcomers] = sorted(free)
        ending = [part for part, size in enumerate(sizes) if size > 1 and columns.draw[part] is not None]
        rows[ending] = range(count, count + len(ending))
        return rows

    def _remember(self, columns: _Columns, rows: Ints, *, is_steady: bool) -> None:
        """Keep the arrangement if the next step may repeat it: every part one row, whose token is its next one."""
        self._steady_keys = columns.key if is_steady else ()
        self._steady_draws = columns.draw
        self._steady_ends = columns.end
        self._steady_rows = rows
        self._steady_blocks = list(map(len, columns.blocks))

    def _append_blocks(self, columns: _Columns) -> None:
        lengths = list(map(len, columns.blocks))
        if lengths == self._steady_blocks:
            return
        rows = self._steady_rows
        for part in np.flatnonzero(np.array(lengths) != np.array(self._steady_blocks)).tolist():
            self._set_blocks(int(rows[part]), self._steady_blocks[part], columns.blocks[part])
        self._steady_blocks = lengths

    def _set_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        self._table[row, first : len(blocks)] = blocks[first:]
        self._known_blocks[row] = len(blocks)

    # --- windows ------------------------------------------------------------------------------------------------------

    def _window(self, asked: int | None) -> int | None:
        """The narrower one of the model's and the request's."""
        own = self._shape.window
        if own is None or asked is None:
            return asked if own is None else own
        return min(own, asked)

    def _grouped(self, columns: _Columns, chunks: Sequence[int]) -> dict[int | None, list[int]]:
        """The parts of ``chunks`` by window, those without one first; in their order otherwise."""
        groups: dict[int | None, list[int]] = {None: []}
        for part in chunks:
            groups.setdefault(self._window(columns.window[part]), []).append(part)
        return {window: parts for window, parts in groups.items() if parts}

    # --- the integers -------------------------------------------------------------------------------------------------

    def _fill_rows(self, count: int, bucket: int, out: StepArrays[Ints]) -> int:
        """The decode batch, padded to ``bucket``. Returns how many block ids it has."""
        size = self._shape.block_size
        if not count:
            return 0
        by_row = self._positions[:count]
        out.row_positions[:count] = by_row
        pages = by_row // size
        offsets = by_row - pages * size
        out.row_slots[:count] = self._table[self._numbers[:count], pages] * size + offsets
        out.row_last_page[:count] = offsets + 1
        pages += 1
        widest = int(pages.max())
        inside = self._columns[:widest] < pages[:, None]
        windows = self._windows[:count]
        if int(windows.min()) < widest * size:
            oldest = np.maximum(by_row + 1 - windows, 0)
            hidden_pages = oldest // size
            out.row_hidden[:count] = oldest - hidden_pages * size
            inside &= self._columns[:widest] >= hidden_pages[:, None]
            pages -= hidden_pages
        else:
            out.row_hidden[:count] = 0
        out.row_pages[0] = 0
        np.cumsum(pages, out=out.row_pages[1 : count + 1])
        used = int(out.row_pages[count])
        out.block_ids[:used] = self._table[:count, :widest][inside]
        return self._pad_rows(count, bucket, used, out)

    def _pad_rows(self, count: int, bucket: int, used: int, out: StepArrays[Ints]) -> int:
        """Rows ``count`` to ``bucket`` attend to nothing, or to one token of the dummy block, and draw nothing.

        Returns the block ids in use.
        """
        padding, each = bucket - count, self._shape.padding_blocks
        out.row_token_ids[count:bucket] = 0
        out.row_sources[count:bucket] = HOST
        out.row_positions[count:bucket] = NOWHERE
        out.row_slots[count:bucket] = NOWHERE
        out.row_last_page[count:bucket] = 1
        out.row_hidden[count:bucket] = 0
        out.row_pages[count + 1 : bucket + 1] = used + each * (1 + self._numbers[:padding])
        out.block_ids[used : used + each * padding] = self._shape.dummy_block
        return used + each * padding

    def _fill_whole(
        self,
        columns: _Columns,
        rows: Ints,
        chunks: Mapping[int | None, Sequence[int]],
        count: int,
        chunk_blocks: int,
        first_row: Ints,
        out: StepArrays[Ints],
    ) -> tuple[int, int]:
        """Every row of the step: the decode rows, then the chunks, by window. Returns the rows and block ids in use."""
        for packed, by_row in (
            (out.token_ids, out.row_token_ids),
            (out.sources, out.row_sources),
            (out.positions, out.row_positions),
            (out.slots, out.row_slots),
            (out.logit_rows, self._numbers),
            (out.logit_positions, out.row_positions),
        ):
            packed[:count] = by_row[:count]
        row, block, index = count, chunk_blocks, 0
        out.chunk_pages[0] = 0
        for group, window in enumerate(chunks):
            group_row = row
            out.chunk_starts[index + group] = 0
            for part in chunks[window]:
                first_row[part] = row
                row, block = self._fill_chunk(columns, part, window, index, (row, block), out)
                index += 1
                out.chunk_starts[index + group] = row - group_row
                out.chunk_pages[index] = block - chunk_blocks
                if rows[part] >= 0:
                    out.logit_rows[rows[part]] = row - 1
                    out.logit_positions[rows[part]] = columns.end[part] - 1
        return row, block

    def _fill_chunk(
        self,
        columns: _Columns,
        part: int,
        window: int | None,
        index: int,
        at: tuple[int, int],
        out: StepArrays[Ints],
    ) -> tuple[int, int]:
        """One chunk from row and block id ``at`` on. Returns where the next one begins.

        Its blocks are those that its first row sees, and later ones.
        """
        row, block = at
        start, end, size = columns.start[part], columns.end[part], self._shape.block_size
        hidden = 0 if window is None else max(start + 1 - window, 0) // size
        last, pages = row + end - start, -(-end // size) - hidden
        tokens = columns.context[part][start:end]
        positions = np.arange(start, end, dtype=np.int32)
        blocks = np.array(columns.blocks[part][hidden : hidden + pages], np.int32)
        out.token_ids[row:last] = tokens
        out.sources[row:last] = HOST
        out.positions[row:last] = positions
        out.slots[row:last] = blocks[positions // size - hidden] * size + positions % size
        out.chunk_last_page[index] = (end - 1) % size + 1
        out.block_ids[block : block + pages] = blocks
        return last, block + pages
