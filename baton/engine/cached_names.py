"""The names in an engine's prefix cache as its front knows them: reports add up to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from itertools import takewhile

from baton.engine.blocks import BlockChange
from baton.engine.mailbox import Mailbox

CHANGES_KEPT = 1024  # block changes that a slow subscriber may lag behind before it sees a gap


class CachedNames:
    def __init__(self) -> None:
        self._added: dict[bytes, int] = {}  # in the order of their adding, with the number of the change
        self._sequence = 0
        self._subscribers: set[Mailbox[BlockChange]] = set()
        self._failure: Exception | None = None

    def apply(self, change: BlockChange) -> None:
        for name in change.removed:
            self._added.pop(name, None)
        for name in change.added:
            self._added.pop(name, None)
            self._added[name] = change.sequence
        self._sequence = change.sequence
        for subscriber in self._subscribers:
            subscriber.put(change)

    def fail(self, error: Exception) -> None:
        """No change will come any more."""
        self._failure = error
        for subscriber in self._subscribers:
            subscriber.fail(error)

    def all(self) -> tuple[int, frozenset[bytes]]:
        return self._sequence, frozenset(self._added)

    def since(self, sequence: int) -> tuple[int, Sequence[bytes]]:
        fresh = [name for name, _ in takewhile(lambda entry: entry[1] > sequence, reversed(self._added.items()))]
        return self._sequence, fresh[::-1]

    def leading(self, names: Sequence[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in self._added), len(names))

    async def changes(self) -> AsyncGenerator[BlockChange, None]:
        changes: Mailbox[BlockChange] = Mailbox(CHANGES_KEPT)
        if self._failure is not None:
            changes.fail(self._failure)
        self._subscribers.add(changes)
        try:
            async for change in changes.stream():
                yield change
        finally:
            self._subscribers.discard(changes)
