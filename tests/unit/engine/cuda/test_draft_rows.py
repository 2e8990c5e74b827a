"""Drafts are rows like any other: packed with their parts, and read back as what the parts drew."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.errors import BatonError
from baton.core.types import Sampling, TokenLogprob
from baton.engine.cuda.batch import Batch, PackedBatch
from baton.engine.cuda.draft_rows import with_draft_rows, without_draft_rows
from baton.engine.cuda.step_arrays import HOST, BatchShape, StepLayout, decode_buckets
from baton.engine.runner import Draw, DrawnToken, Part, PartDetail

BLOCK = 4
SHAPE = BatchShape(12, 40, BLOCK, blocks=16, dummy_block=999, buckets=decode_buckets(12), padding_blocks=0)
DRAW = Draw(Sampling(), 1)


def part(key: int, context: list[int], *drafts: int, blocks: list[int] | None = None) -> Part:
    """The last token of ``context``."""
    length = len(context)
    own = list(range(100 * key, 100 * key + 10)) if blocks is None else blocks
    return Part(key, context, length - 1, length, own, DRAW, drafts=drafts)


class Packed:
    """A batch whose every step is checked against what the parts say."""

    def __init__(self) -> None:
        layout = StepLayout(SHAPE)
        self.batch = Batch(SHAPE)
        self.out = layout.views(np.zeros(layout.size, np.int32))

    def pack(self, *parts: Part) -> PackedBatch:
        packed = self.batch.pack(with_draft_rows(parts), self.out)
        draft_row = len(parts)
        for index, one in enumerate(parts):
            rows = [index, *range(draft_row, draft_row + len(one.drafts))]
            draft_row += len(one.drafts)
            for offset, row in enumerate(packed.logit_row[rows].tolist()):
                self.check(row, one, offset)
        assert packed.bucket == SHAPE.bucket(draft_row)
        assert sorted(packed.logit_row.tolist()) == list(range(draft_row))
        return packed

    def check(self, row: int, one: Part, offset: int) -> None:
        out, position = self.out, one.start + offset
        assert out.row_sources[row] == HOST
        assert out.row_token_ids[row] == [*one.context, *one.drafts][position]
        assert out.row_positions[row] == position
        assert out.row_slots[row] == one.blocks[position // BLOCK] * BLOCK + position % BLOCK
        pages = out.block_ids[out.row_pages[row] : out.row_pages[row + 1]].tolist()
        assert pages == one.blocks[: len(pages)]
        assert (len(pages) - 1) * BLOCK + out.row_last_page[row] == position + 1


def test_each_draft_is_a_row_at_its_position_in_the_blocks_of_its_part() -> None:
    Packed().pack(part(1, [1, 2, 3, 4, 5], 6, 7, 8, 9), part(2, [11, 12]), part(3, [21, 22, 23], 24, 25))


def test_a_step_after_drafts_takes_its_tokens_from_the_host() -> None:
    """However many drafts were right, and however many there are now; the rows keep what they know of the sequence."""
    packed = Packed()
    context = [1, 2, 3]
    packed.pack(part(1, context, 4, 5, 6), part(2, [9, 9]))
    for new in ([4], [4, 5], [4, 5, 6, 7]):
        context += new
        changes = packed.pack(part(1, context, 70, 71, 72), part(2, [9, 9, *range(len(context))])).changes
        assert changes == []
    packed.pack(part(1, [*context, 8]), part(2, [9, 9, 9]))
    packed.pack(part(1, [*context, 8, 9], 1, 2, 3, 4, 5), part(2, [9, 9, 9, 9], 5))


def test_rows_of_drafts_are_forgotten_with_their_sequence() -> None:
    packed = Packed()
    packed.pack(part(1, [1, 2, 3], 4, 5, 6), part(2, [9, 9]))
    packed.batch.forget(1)
    packed.pack(part(1, [1, 2, 3, 4], 4, 5, 6, blocks=[51, 52, 53]), part(2, [9, 9, 9]))


def test_without_drafts_parts_are_left_as_they_are() -> None:
    parts = [part(1, [1, 2]), part(2, [3])]
    assert with_draft_rows(parts) is parts


@pytest.mark.parametrize(
    ("tokens", "drawn"), [([5, 6, 7], [5]), ([4, 6, 7], [4, 6]), ([4, 5, 7], [4, 5, 7]), ([4, None, 7], [4])]
)
def test_what_is_drawn_counts_up_to_the_first_that_differs_from_its_draft(
    tokens: list[int | None], drawn: list[int]
) -> None:
    parts = with_draft_rows([part(9, [1, 1]), part(1, [1, 2, 3], 4, 5)])
    result = without_draft_rows(parts, 2, [8, tokens[0], *tokens[1:]], {})
    assert result.token_ids == [8, None]
    assert result.details == {1: PartDetail(drawn=tuple(map(DrawnToken, drawn)))}


def test_log_probabilities_go_with_their_tokens_and_an_error_with_its_part() -> None:
    parts = with_draft_rows([part(1, [1, 2, 3], 4), part(2, [7, 7], 7)])
    scores = [TokenLogprob(token, -1.0) for token in (4, 8)]
    error = PartDetail(error=BatonError("broken"))
    details = {0: PartDetail(scores[0]), 1: error, 2: PartDetail(scores[1]), 3: PartDetail(scores[0])}
    result = without_draft_rows(parts, 2, [4, None, 8, 7], details)
    assert result.details == {0: PartDetail(drawn=(DrawnToken(4, scores[0]), DrawnToken(8, scores[1]))), 1: error}
