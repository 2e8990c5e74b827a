"""The packed batch, checked against what each part says, with a toy device that draws and feeds tokens by row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.core.types import Sampling
from baton.engine.cuda.batch import Batch, PackedBatch
from baton.engine.cuda.step_arrays import HOST, NOWHERE, BatchShape, StepArrays, StepLayout, decode_buckets
from baton.engine.runner import Draw, Part

BLOCK = 4
DUMMY = 999
SHAPE = BatchShape(12, 40, BLOCK, blocks=16, dummy_block=DUMMY, buckets=decode_buckets(12), padding_blocks=1)


@dataclass
class Life:
    """A sequence as the engine sees it: its true tokens, of which the last may not have arrived on the host."""

    key: int
    tokens: list[int]
    known: list[int]
    blocks: list[int]
    computed: int = 0
    draw: Draw = field(default_factory=lambda: Draw(Sampling(), 1))
    window: int | None = None

    def part(self, budget: int) -> Part:
        end = min(len(self.tokens), self.computed + budget)
        draw = self.draw if end == len(self.tokens) else None
        return Part(self.key, self.known, self.computed, end, self.blocks, draw, window=self.window)


class Toy:
    """A device that has the step's buffer and the drawn tokens, and a host that is one step behind."""

    def __init__(self, shape: BatchShape = SHAPE) -> None:
        layout = StepLayout(shape)
        self.shape = shape
        self.batch = Batch(shape)
        self.out: StepArrays[NDArray[np.int32]] = layout.views(np.zeros(layout.size, np.int32))
        self.drawn = np.full(shape.rows, -7, np.int32)
        self.late: list[tuple[Life, int]] = []
        self.next_block = 0

    def life(self, key: int, length: int) -> Life:
        tokens = [key * 100 + i for i in range(length)]
        return Life(key, tokens, list(tokens), [])

    def run(self, lives: Sequence[Life], budget: int = 1) -> PackedBatch:
        """Pack a step, check it, draw, and let the tokens of the step before arrive on the host."""
        parts: list[Part] = []
        for life in lives:
            part = life.part(budget if len(life.tokens) - life.computed > 1 else 1)
            while len(life.blocks) * BLOCK < part.end:
                life.blocks.append(self.next_block)
                self.next_block += 1
            parts.append(part)
        packed = self.batch.pack(parts, self.out)
        self.check(lives, parts, packed)
        arrived, self.late = self.late, []
        for life, token in arrived:
            life.known.append(token)
        drawn = self.drawn.copy()
        for life, part, row in zip(lives, parts, packed.logit_row.tolist(), strict=True):
            life.computed = part.end
            if part.draw is not None:
                token = random.Random(life.key * 7919 + part.end).randrange(10**6)
                life.tokens.append(token)
                self.late.append((life, token))
                drawn[row] = token
        self.drawn = drawn
        return packed

    def token(self, token: int, source: int) -> int:
        return token if source == HOST else int(self.drawn[source])

    def check(self, lives: Sequence[Life], parts: Sequence[Part], packed: PackedBatch) -> None:
        out = self.out
        assert packed.bucket == self.shape.bucket(packed.rows)
        for index, (life, part) in enumerate(zip(lives, parts, strict=True)):
            row = int(packed.logit_row[index])
            if part.end - part.start == 1:
                assert 0 <= row < packed.rows
                assert self.token(out.row_token_ids[row], out.row_sources[row]) == life.tokens[part.start]
                assert out.row_positions[row] == part.start
                assert out.row_slots[row] == slot(life, part.start)
                pages = out.block_ids[out.row_pages[row] : out.row_pages[row + 1]]
                assert 0 <= out.row_hidden[row] < BLOCK
                seen = range(out.row_hidden[row], (len(pages) - 1) * BLOCK + out.row_last_page[row])
                assert [pages[at // BLOCK] * BLOCK + at % BLOCK for at in seen] == self.visible(life, part.end)
            if packed.whole:
                first = int(packed.first_row[index])
                for offset in range(part.end - part.start):
                    at = first + offset
                    assert self.token(out.token_ids[at], out.sources[at]) == life.tokens[part.start + offset]
                    assert out.positions[at] == part.start + offset
                    assert out.slots[at] == slot(life, part.start + offset)
                if row >= 0:
                    assert out.logit_rows[row] == first + part.end - part.start - 1
                    assert out.logit_positions[row] == part.end - 1
        rows = [row for row in packed.logit_row.tolist() if row >= 0]
        assert sorted(rows) == list(range(packed.logits))
        self.check_chunks(lives, parts, packed)
        for row in range(packed.rows, packed.bucket):
            assert (out.row_sources[row], out.row_slots[row]) == (HOST, NOWHERE)
            assert (out.row_last_page[row], out.row_hidden[row]) == (1, 0)
            assert (
                list(out.block_ids[out.row_pages[row] : out.row_pages[row + 1]]) == [DUMMY] * self.shape.padding_blocks
            )

    def visible(self, life: Life, end: int) -> list[int]:
        """The slots that the token before ``end`` sees."""
        windows = [window for window in (life.window, self.shape.window) if window is not None]
        return [slot(life, position) for position in range(max(0, end - min(windows, default=end)), end)]

    def check_chunks(self, lives: Sequence[Life], parts: Sequence[Part], packed: PackedBatch) -> None:
        """Group by group, in the order of their rows: no window first, and each window once."""
        chunks = [(life, part) for life, part in zip(lives, parts, strict=True) if part.end - part.start > 1]
        first_row = {part.key: int(row) for part, row in zip(parts, packed.first_row, strict=True)}
        chunks.sort(key=lambda each: first_row[each[1].key])
        assert len(chunks) == packed.chunks
        assert len({group.window for group in packed.groups}) == len(packed.groups)
        assert all(group.window is not None for group in packed.groups[1:])
        row, index = packed.rows, 0
        for number, (window, count) in enumerate(packed.groups):
            starts = self.out.chunk_starts[index + number : index + number + count + 1].tolist()
            assert starts[0] == 0
            for start, end in pairwise(starts):
                life, part = chunks[index]
                assert (first_row[part.key], end - start) == (row + start, part.end - part.start)
                self.check_chunk(life, part, packed, window, index)
                index += 1
            row += starts[-1]
        assert not packed.groups or row == packed.tokens

    def check_chunk(self, life: Life, part: Part, packed: PackedBatch, window: int | None, index: int) -> None:
        """Each of its rows sees, back from the end of the chunk's blocks, what its window says."""
        out = self.out
        first, last = out.chunk_pages[index : index + 2] + packed.chunk_blocks
        assert last <= packed.blocks
        pages = out.block_ids[first:last].tolist()
        slots = [page * BLOCK + offset for page in pages for offset in range(BLOCK)]
        length = (len(pages) - 1) * BLOCK + int(out.chunk_last_page[index])
        for end in range(part.start + 1, part.end + 1):
            stop = length - (part.end - end)
            assert slots[max(0, stop - (window or stop)) : stop] == self.visible(life, end)
        assert set(slots[:BLOCK]) & set(self.visible(life, part.start + 1)), "a block that nobody sees"


def slot(life: Life, position: int) -> int:
    return life.blocks[position // BLOCK] * BLOCK + position % BLOCK


def rows_of(packed: PackedBatch) -> list[int]:
    return packed.logit_row.tolist()


def test_a_steady_batch_changes_no_row_over_block_boundaries() -> None:
    toy = Toy()
    lives = [toy.life(key, 3 + key) for key in range(5)]
    toy.run(lives, budget=8)
    toy.run(lives)
    rows = None
    for _ in range(3 * BLOCK):
        packed = toy.run(lives)
        assert packed.changes == []
        assert not packed.whole
        assert rows in (None, rows_of(packed))
        rows = rows_of(packed)


def test_a_sequence_that_leaves_moves_only_the_last_row() -> None:
    toy = Toy()
    lives = [toy.life(key, 2) for key in range(6)]
    toy.run(lives, budget=8)
    before = dict(zip([life.key for life in lives], rows_of(toy.run(lives)), strict=True))
    gone = lives.pop(1)
    toy.batch.forget(gone.key)
    packed = toy.run(lives)
    after = dict(zip([life.key for life in lives], rows_of(packed), strict=True))
    moved = [key for key in after if before[key] != after[key]]
    assert moved == [5]
    assert [(change.row, lives[change.part].key) for change in packed.changes] == [(before[gone.key], 5)]
    assert toy.out.row_sources[before[gone.key]] == before[5]
    toy.run(lives)
    toy.run(lives)


def test_an_order_of_the_scheduler_does_not_move_rows() -> None:
    toy = Toy()
    lives = [toy.life(key, 2) for key in range(6)]
    toy.run(lives, budget=8)
    before = dict(zip([life.key for life in lives], rows_of(toy.run(lives)), strict=True))
    lives.reverse()
    packed = toy.run(lives)
    assert dict(zip([life.key for life in lives], rows_of(packed), strict=True)) == before
    assert packed.changes == []


def test_a_prompt_that_ends_beside_decoding_takes_the_row_that_it_keeps() -> None:
    toy = Toy()
    old = [toy.life(key, 2) for key in range(3)]
    toy.run(old, budget=8)
    toy.run(old)
    newcomer = toy.life(9, 20)
    first = toy.run([*old, newcomer], budget=15)
    assert rows_of(first)[-1] == -1
    last = toy.run([*old, newcomer], budget=15)
    assert rows_of(last)[-1] == 3
    packed = toy.run([*old, newcomer])
    assert rows_of(packed)[-1] == 3
    assert packed.changes == []


def test_rows_with_windows_and_without_share_steady_steps() -> None:
    toy = Toy()
    lives = [toy.life(key, 10 + key) for key in range(5)]
    for life, window in zip(lives, (None, 1, 6, BLOCK, 1000), strict=True):
        life.window = window
    assert len(toy.run(lives, budget=8).groups) == 5
    toy.run(lives, budget=8)
    toy.run(lives)
    for _ in range(3 * BLOCK):
        assert toy.run(lives).changes == []
    whole, one, six, four, wide = np.diff(toy.out.row_pages[:6]).tolist()
    assert (whole, one, wide) == (len(lives[0].blocks), 1, len(lives[4].blocks))
    assert six <= 3
    assert four <= 2


def test_a_row_that_changes_hands_loses_its_window() -> None:
    toy = Toy()
    first, second = toy.life(1, 9), toy.life(2, 9)
    first.window = 2
    toy.run([first], budget=20)
    toy.run([first])
    toy.batch.forget(1)
    toy.run([second], budget=20)
    toy.run([second])
    assert toy.out.row_hidden[0] == 0


def test_a_new_way_to_draw_is_reported_for_its_row_alone() -> None:
    toy = Toy()
    lives = [toy.life(key, 2) for key in range(4)]
    toy.run(lives, budget=8)
    toy.run(lives)
    lives[2].draw = Draw(Sampling(temperature=0.5), 1, (7,))
    packed = toy.run(lives)
    assert packed.changes == [(rows_of(packed)[2], 2)]
    assert toy.run(lives).changes == []


def test_a_forgotten_sequence_starts_anew_with_other_blocks() -> None:
    toy = Toy()
    lives = [toy.life(key, 2) for key in range(3)]
    toy.run(lives, budget=8)
    toy.run(lives)
    lost = lives[1]
    toy.batch.forget(lost.key)
    toy.run([lives[0], lives[2]])
    lost.blocks.clear()
    lost.computed = len(lost.tokens) - 1  # all but the last token found in the prefix cache, in other blocks
    lost.blocks = [70 + i for i in range(len(lost.tokens) // BLOCK + 1)]
    row = rows_of(toy.run(lives))[1]
    assert toy.out.row_sources[row] == HOST


def test_a_token_neither_known_nor_drawn_is_refused() -> None:
    toy = Toy()
    lives = [toy.life(1, 2)]
    toy.run(lives, budget=8)
    toy.batch.forget(1)
    with pytest.raises(IndexError):
        toy.batch.pack([lives[0].part(1)], toy.out)


def test_buckets_are_small_steps_to_the_largest_batch() -> None:
    assert decode_buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert decode_buckets(3) == (1, 2, 3)
    assert decode_buckets(300)[-3:] == (256, 288, 300)
    assert SHAPE.bucket(0) == 0
    assert [SHAPE.bucket(rows) for rows in (1, 3, 5, 9)] == [1, 4, 8, 12]


@pytest.mark.parametrize("own", [None, 9])
@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_is_packed_as_its_parts_say(seed: int, own: int | None) -> None:
    """Arrivals, ends, preemptions, chunks of any size, shuffled orders and windows, the model's own among them; the
    host always one step behind."""
    chance = random.Random(seed)
    toy = Toy(replace(SHAPE, window=own))
    live: list[Life] = []
    keys = iter(range(1, 10_000))
    for _ in range(120):
        live = list(_survivors(toy, live, chance))
        while len(live) < 8 and chance.random() < 0.4:
            live.append(toy.life(next(keys), chance.randrange(1, 30)))
            live[-1].window = chance.choice([None, None, 1, BLOCK, 6, 11, 100])
        if chance.random() < 0.3:
            chance.shuffle(live)
        if live:
            toy.run(live, budget=chance.choice([1, 2, 5]))


def _survivors(toy: Toy, live: list[Life], chance: random.Random) -> Iterator[Life]:
    for life in live:
        if len(life.tokens) > 50 or chance.random() < 0.03:
            toy.batch.forget(life.key)
        else:
            yield life
