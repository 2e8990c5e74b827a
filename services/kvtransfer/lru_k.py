"""Which block to evict: the one whose K-th last use is longest ago. Pure.

LRU-K (O'Neil, O'Neil and Weikum, SIGMOD 1993): blocks with fewer than K uses go first, the least recently used of them
before the others. So a long prompt that is seen once does not drive out the system prompts that everybody shares.
"""

from __future__ import annotations

import heapq
from collections import deque

NEVER = -1  # stands for the K-th last use of a block with fewer than K uses


class LruK:
    """Uses are counted, not timed: only their order matters."""

    def __init__(self, k: int = 2) -> None:
        self._k = k
        self._uses: dict[bytes, deque[int]] = {}
        self._pinned: set[bytes] = set()
        self._count = 0
        self._heap: list[tuple[int, int, bytes]] = []  # with entries that later uses have made stale

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, name: bytes) -> bool:
        return name in self._uses

    def use(self, name: bytes) -> None:
        """The first use makes the block known."""
        self._count += 1
        self._uses.setdefault(name, deque(maxlen=self._k)).append(self._count)
        self._queue(name)

    def forget(self, name: bytes) -> None:
        self._uses.pop(name, None)
        self._pinned.discard(name)

    def pin(self, name: bytes) -> None:
        """A known block is no victim until ``unpin``."""
        if name in self._uses:
            self._pinned.add(name)

    def unpin(self, name: bytes) -> None:
        if name in self._pinned:
            self._pinned.remove(name)
            self._queue(name)

    def victim(self) -> bytes | None:
        """The block to evict next, which stays known; None when all are pinned."""
        while self._heap:
            kth, last, name = self._heap[0]
            if name in self._uses and name not in self._pinned and (kth, last) == self._rank(name):
                return name
            heapq.heappop(self._heap)
        return None

    def _rank(self, name: bytes) -> tuple[int, int]:
        uses = self._uses[name]
        return (uses[0] if len(uses) == self._k else NEVER, uses[-1])

    def _queue(self, name: bytes) -> None:
        heapq.heappush(self._heap, (*self._rank(name), name))
        if len(self._heap) > 64 + 4 * len(self._uses):
            self._heap = [(*self._rank(each), each) for each in self._uses if each not in self._pinned]
            heapq.heapify(self._heap)
