"""Drafts as rows of the decode batch: each is a row of its own at the position it is a guess for, in the same blocks.

Rows attend on their own, and a layer writes the keys and values of all rows before any of them attends. So nothing on
the device knows of drafts; the host spreads them over rows and reads what their parts drew. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from baton.engine.runner import DrawnToken, Part, PartDetail, StepResult

_KEYS = 1 << 64  # of sequences


class DraftTokens(Sequence[int]):
    """A context of which only the drafts can be read, at their positions from ``first`` on."""

    def __init__(self, first: int, drafts: tuple[int, ...]) -> None:
        self._first = first
        self._drafts = drafts

    def __len__(self) -> int:
        return self._first + len(self._drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice) or index < self._first:
            raise IndexError(f"only single tokens from {self._first} on can be read, not {index}")
        return self._drafts[index - self._first]


def draft_key(key: int, number: int) -> int:
    """Names the row of the sequence's draft ``number``, counted from 1: the same one whenever it has so many."""
    return key + number * _KEYS


def with_draft_rows(parts: Sequence[Part]) -> Sequence[Part]:
    """``parts``, and behind them one of a single row for each draft, in their order."""
    rows = [row for part in parts if part.drafts for row in _draft_rows(part)]
    return [*parts, *rows] if rows else parts


def _draft_rows(part: Part) -> Iterator[Part]:
    tokens = DraftTokens(part.end, part.drafts)
    for number in range(1, len(part.drafts) + 1):
        start = part.end + number - 1
        yield Part(draft_key(part.key, number), tokens, start, start + 1, part.blocks, part.draw, window=part.window)


def without_draft_rows(
    parts: Sequence[Part], launched: int, token_ids: Sequence[int | None], details: Mapping[int, PartDetail]
) -> StepResult:
    """The results of the first ``launched`` of ``parts``, as ``with_draft_rows`` gave them, from those of all."""
    tokens = list(token_ids[:launched])
    found = {index: detail for index, detail in details.items() if index < launched}
    row = launched
    for index, part in enumerate(parts[:launched]):
        if part.drafts:
            rows = (index, *range(row, row + len(part.drafts)))
            row += len(part.drafts)
            tokens[index] = None
            found[index] = _verified(part, rows, token_ids, details)
    return StepResult(tokens, found)


def _verified(
    part: Part, rows: Sequence[int], token_ids: Sequence[int | None], details: Mapping[int, PartDetail]
) -> PartDetail:
    """The tokens drawn by ``rows``, one and then one for each right draft."""
    nothing = PartDetail()
    first = details.get(rows[0], nothing)
    if first.error is not None:
        return first
    drawn: list[DrawnToken] = []
    for row, draft in zip(rows, (*part.drafts, None), strict=True):
        token_id = token_ids[row]
        if token_id is None:
            break
        drawn.append(DrawnToken(token_id, details.get(row, nothing).logprob))
        if token_id != draft:
            break
    return PartDetail(drawn=tuple(drawn))
