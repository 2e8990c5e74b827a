"""Drafters that know the answers, or never do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from baton.engine.drafter import Query


class Oracle:
    """Satisfies ``Drafter``: knows whole contexts, and is mistaken in one of ``mistaken`` tokens (0: in none)."""

    worth = 0.25

    def __init__(self, known: Sequence[list[int]], vocab_size: int, mistaken: int) -> None:
        self._known = known
        self._vocab_size = vocab_size
        self._mistaken = mistaken

    def expects(self, key: int, context: Sequence[int]) -> bool:
        return self._chance(context) % 4 > 0

    def propose(self, asked: Sequence[Query]) -> list[tuple[int, ...]]:
        return [self._follow(list(query.context), query.limit) for query in asked]

    def _follow(self, context: list[int], limit: int) -> tuple[int, ...]:
        chance, length = self._chance(context), len(context)
        known = [whole for whole in self._known if whole[:length] == context and len(whole) > length]
        drafts = known[chance % len(known)][length : length + limit] if known else [chance % self._vocab_size]
        return tuple(self._mangled(token, chance + index) for index, token in enumerate(drafts))

    def _mangled(self, token: int, chance: int) -> int:
        is_wrong = self._mistaken and chance % self._mistaken == 0
        return (token + 1) % self._vocab_size if is_wrong else token

    def _chance(self, context: Sequence[int]) -> int:
        return zlib.crc32(repr(context[-3:]).encode()) + len(context)

    def forget(self, key: int) -> None: ...


class Wrong:
    """Satisfies ``Drafter``: always expects to be right, and is not."""

    worth = 0.25

    def expects(self, key: int, context: Sequence[int]) -> bool:
        return True

    def propose(self, asked: Sequence[Query]) -> list[tuple[int, ...]]:
        return [(0,) * query.limit for query in asked]

    def forget(self, key: int) -> None: ...
