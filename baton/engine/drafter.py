"""Guesses of what an answer goes on with: ``Drafter``, and one that looks it up in the answer's own context. Pure.

What is guessed wrong costs a row of a step, never a token: the runner draws each token as it would have anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

NGRAM_SIZES = (4, 3, 2)  # a longer one is a better guess, so it is looked up first
INDEXED_AT_ONCE = 8192  # tokens: what a long prompt holds up a step by


class Query(NamedTuple):
    """At most ``limit`` drafts are wanted of what follows ``context``, all of which is known."""

    key: int
    context: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Proposes drafts. ``key`` names a sequence, whose context is only ever appended to, until it is forgotten."""

    @property
    def worth(self) -> float:
        """Drafts that must be right at each try for the work of guessing to pay."""
        ...

    def expects(self, key: int, context: Sequence[int]) -> bool:
        """Whether there would be drafts once the token in flight is known. Cheap."""
        ...

    def propose(self, asked: Sequence[Query]) -> list[tuple[int, ...]]:
        """Drafts for each query, none where there is no guess."""
        ...

    def forget(self, key: int) -> None: ...


class NoDrafts:
    """Satisfies ``Drafter`` without a guess."""

    worth = 0.0

    def expects(self, key: int, context: Sequence[int]) -> bool:
        return False

    def propose(self, asked: Sequence[Query]) -> list[tuple[int, ...]]:
        return [()] * len(asked)

    def forget(self, key: int) -> None:
        """There is nothing to forget."""


class NgramDrafter:
    """Satisfies ``Drafter`` by prompt lookup: what followed the last tokens when they stood in the context before."""

    worth = 0.25

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def expects(self, key: int, context: Sequence[int]) -> bool:
        return self._index(key, context).find(context) is not None

    def propose(self, asked: Sequence[Query]) -> list[tuple[int, ...]]:
        return [self._follow(query) for query in asked]

    def forget(self, key: int) -> None:
        self._indexes.pop(key, None)

    def _index(self, key: int, context: Sequence[int]) -> NgramIndex:
        index = self._indexes.setdefault(key, NgramIndex())
        index.extend(context)
        return index

    def _follow(self, query: Query) -> tuple[int, ...]:
        """What followed then; where that reaches the context's end, the drafts themselves are what follows it."""
        context = query.context
        start = self._index(query.key, context).find(context)
        if start is None:
            return ()
        drafts = list(context[start : start + query.limit])
        while len(drafts) < query.limit:
            drafts.append(drafts[start + len(drafts) - len(context)])
        return tuple(drafts)


class NgramIndex:
    """Where each n-gram of one context ended last, kept up to date at a cost of the new tokens alone."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in NGRAM_SIZES}
        self._indexed = 0  # n-grams that end here or before are known

    def extend(self, context: Sequence[int]) -> None:
        """Take in what ``context`` has gained, but for n-grams that nothing follows yet; long gains piece by piece."""
        end = min(len(context) - 1, self._indexed + INDEXED_AT_ONCE)
        if end <= self._indexed:
            return
        for size, ends in self._ends.items():
            first = max(0, self._indexed + 1 - size)
            tokens = context[first:end]
            grams = zip(*(tokens[i:] for i in range(size)), strict=False)  # as many as the shortest has
            ends.update(zip(grams, range(first + size, end + 1), strict=True))
        self._indexed = end

    def find(self, context: Sequence[int]) -> int | None:
        """Where that stands which followed the longest known n-gram that ends ``context``."""
        for size, ends in self._ends.items():
            end = ends.get(tuple(context[-size:]))
            if end is not None:
                return end
        return None
