"""The table that tells the device sampler how to draw, packed without a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from baton.core.types import Sampling
from baton.engine.cuda.sampling_rows import (
    COUNT,
    DRAWN,
    EDIT,
    IDLE,
    LIKELIEST,
    NO_SLOT,
    REFUSED,
    ROW_DRAW,
    SamplingRows,
)
from baton.engine.runner import Draw

VOCAB, ROWS, EDITS = 1000, 4, 8
PENALIZED = Draw(Sampling(frequency_penalty=0.5), prompt_length=2)
CAPACITY = 1000


def rows_with(*draws: Draw | None) -> SamplingRows:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    for row, draw in enumerate(draws):
        rows.set_row(row, 100 + row, draw, [1, 2, 3])
    return rows


def packed(rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """The draws and edits of the table, contexts counted first."""
    for _ in rows.rounds(CAPACITY):
        pass
    table = np.full(rows.table_bytes, 0xFF, np.uint8)
    used = rows.pack(table)
    end = ROWS * ROW_DRAW.itemsize
    return table[:end].view(ROW_DRAW), table[end:used].view(EDIT)


def counted(rows: SamplingRows, capacity: int = CAPACITY) -> list[list[tuple[int, int, list[int], list[int]]]]:
    """By round and part: slot, whether it starts afresh, prompt and output tokens."""
    rounds = []
    for batch in rows.rounds(capacity):
        assert len(batch.tokens) <= capacity
        parts = []
        for part in batch.parts:
            middle = part["first"] + part["prompt"]
            prompt, output = batch.tokens[part["first"] : middle], batch.tokens[middle : middle + part["output"]]
            parts.append((int(part["slot"]), int(part["fresh"]), prompt.tolist(), output.tolist()))
        rounds.append(parts)
    return rounds


def test_records_have_the_sizes_that_the_kernels_read() -> None:
    assert (ROW_DRAW.itemsize, EDIT.itemsize, COUNT.itemsize) == (80, 8, 32)


def test_rows_that_nobody_set_draw_nothing() -> None:
    draws, edits = packed(rows_with())
    assert draws["kind"].tolist() == [IDLE] * ROWS
    assert len(edits) == 0


def test_kinds_follow_the_temperature() -> None:
    draws, _ = packed(rows_with(Draw(Sampling(), 1), Draw(Sampling(temperature=0.5), 1), None))
    assert draws["kind"].tolist() == [LIKELIEST, DRAWN, IDLE, IDLE]


@pytest.mark.parametrize("temperature", [1e-300, 0.01, 0.7, 1.0, 3.3, 1e300])
def test_the_inverse_temperature_has_twice_the_digits_of_a_float(temperature: float) -> None:
    draws, _ = packed(rows_with(Draw(Sampling(temperature=temperature), 1)))
    inverse = float(draws["inverse_high"][0]) + float(draws["inverse_low"][0])
    assert inverse == pytest.approx(1 / min(max(temperature, 1e-30), 1e30), rel=1e-13)


@pytest.mark.parametrize(("min_p", "drop"), [(0.0, -math.inf), (1.0, 0.0), (0.25, 2 * math.log(0.25))])
def test_min_p_is_a_distance_below_the_largest_logit(min_p: float, drop: float) -> None:
    draws, _ = packed(rows_with(Draw(Sampling(temperature=2, min_p=min_p), 1)))
    assert draws["min_p_drop"][0] == drop


@pytest.mark.parametrize(("top_k", "kept"), [(0, 0), (5, 5), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (1 << 40, 0)])
def test_top_k_of_the_whole_vocabulary_is_off(top_k: int, kept: int) -> None:
    draws, _ = packed(rows_with(Draw(Sampling(temperature=1, top_k=top_k), 1)))
    assert draws["top_k"][0] == kept


def test_a_negative_seed_keeps_its_low_64_bits() -> None:
    draws, _ = packed(rows_with(Draw(Sampling(temperature=1, seed=-1), 1)))
    assert int(draws["seed"][0]) == (1 << 64) - 1


def test_biases_are_sorted_by_token_and_forbidding_comes_last() -> None:
    sampling = Sampling(logit_bias=((9, 1.0), (3, 2.0), (9, -4.0)))
    draws, edits = packed(rows_with(Draw(sampling, 1, forbidden=(9, 1)), None, Draw(Sampling(), 1, forbidden=(5,))))
    assert draws["edits"].tolist() == [4 + 1, 0, 1, 0]
    first = int(draws["first_edit"][0])
    assert edits[first : first + 5].tolist() == [(1, -math.inf), (3, 2.0), (9, 1.0), (9, -4.0), (9, -math.inf)]
    assert edits[int(draws["first_edit"][2])].tolist() == (5, -math.inf)


def test_tokens_outside_the_vocabulary_are_not_edited() -> None:
    _, edits = packed(rows_with(Draw(Sampling(logit_bias=((-1, 1.0), (VOCAB, 1.0))), 1, forbidden=(VOCAB + 5, 3))))
    assert edits["token"].tolist() == [3]


def test_too_many_edits_refuse_that_row_alone() -> None:
    crowd = Sampling(logit_bias=tuple((token, 1.0) for token in range(EDITS + 1)))
    draws, edits = packed(rows_with(Draw(crowd, 1), Draw(Sampling(), 1, forbidden=tuple(range(EDITS)))))
    assert draws["kind"].tolist()[:2] == [REFUSED, LIKELIEST]
    assert len(edits) == EDITS


def test_a_row_set_anew_keeps_nothing_of_its_last_draw() -> None:
    rows = rows_with(Draw(Sampling(frequency_penalty=1, logit_bias=((1, 1.0),)), 1))
    packed(rows)
    rows.set_row(0, 200, Draw(Sampling(), 1), [])
    draws, edits = packed(rows)
    assert (draws["slot"][0], draws["edits"][0], len(edits)) == (NO_SLOT, 0, 0)


def test_nothing_is_changed_until_something_is_set() -> None:
    rows = rows_with(Draw(Sampling(), 1))
    assert rows.is_changed
    packed(rows)
    assert not rows.is_changed
    rows.set_row(0, 100, None, [])
    assert rows.is_changed


# --- penalties --------------------------------------------------------------------------------------------------------


def test_a_context_is_split_at_the_prompts_end() -> None:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    rows.set_row(0, 7, PENALIZED, [4, 5, 6, 6])
    ((part,),) = counted(rows)
    assert part[1:] == (1, [4, 5], [6, 6])
    draws, _ = packed(rows)
    assert draws["slot"][0] == part[0]


def test_only_penalties_count_a_context() -> None:
    rows = rows_with(Draw(Sampling(temperature=1, logit_bias=((1, 2.0),)), 1), Draw(Sampling(), 1, forbidden=(2,)))
    assert counted(rows) == []
    draws, _ = packed(rows)
    assert set(draws["slot"].tolist()) == {NO_SLOT}


def test_a_sequence_is_counted_once_wherever_it_moves() -> None:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    rows.set_row(0, 7, PENALIZED, [1, 2])
    rows.set_row(1, 8, PENALIZED, [1, 2])
    (parts,) = counted(rows)
    assert len(parts) == 2
    before = packed(rows)[0]["slot"].tolist()
    rows.set_row(1, 7, PENALIZED, [1, 2, 3])  # 7 and 8 change places; 3 was counted by the device when it was drawn
    rows.set_row(0, 8, PENALIZED, [1, 2, 4])
    assert counted(rows) == []
    assert packed(rows)[0]["slot"].tolist()[:2] == before[1::-1]


def test_new_rules_for_a_sequence_keep_its_counts() -> None:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    early = Draw(PENALIZED.sampling, 2, forbidden=(1,))
    rows.set_row(0, 7, early, [1, 2])
    assert len(counted(rows)) == 1
    rows.set_row(0, 7, PENALIZED, [1, 2])
    assert counted(rows) == []


def test_a_sequence_that_was_forgotten_is_counted_anew() -> None:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    rows.set_row(0, 7, PENALIZED, [1, 2])
    counted(rows)
    rows.forget(7)
    assert packed(rows)[0]["kind"][0] == IDLE
    rows.set_row(0, 7, PENALIZED, [1, 2, 3])
    ((part,),) = counted(rows)
    assert part[1:] == (1, [1, 2], [3])


def test_more_sequences_than_slots_take_those_of_the_absent() -> None:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    for key in range(3 * ROWS):  # nobody is forgotten
        rows.set_row(key % ROWS, key, PENALIZED, [key])
        counted(rows)
    slots = packed(rows)[0]["slot"].tolist()
    assert sorted(slots) == list(range(ROWS))
    rows.set_row(0, 2 * ROWS, PENALIZED, [0])  # still present: counted already
    assert counted(rows) == []
    rows.set_row(0, 0, PENALIZED, [0, 9, 9])
    ((part,),) = counted(rows)
    assert part[1:] == (1, [0, 9], [9])


@pytest.mark.parametrize("capacity", [1, 3, 4, 5, 100])
def test_contexts_longer_than_the_staging_are_counted_in_pieces(capacity: int) -> None:
    rows = SamplingRows(VOCAB, ROWS, EDITS)
    contexts: list[Sequence[int]] = [[1, 2, 3, 4, 5, 6, 7], [], [8, 9], [10]]
    for row, context in enumerate(contexts):
        rows.set_row(row, row, PENALIZED, context)
    rounds = counted(rows, capacity)
    slots = packed(rows)[0]["slot"].tolist()
    for parts in rounds:
        assert len({part[0] for part in parts}) == len(parts)  # a slot once a launch
    for slot, context in zip(slots, contexts, strict=True):
        pieces = [part for parts in rounds for part in parts if part[0] == slot]
        assert [piece[1] for piece in pieces] == [1, *[0] * (len(pieces) - 1)]
        assert [token for piece in pieces for token in piece[2]] == list(context[:2])
        assert [token for piece in pieces for token in piece[3]] == list(context[2:])
