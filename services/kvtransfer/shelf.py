"""A bounded number of bytes for named blocks, and who has to leave when more come. Pure bookkeeping, no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.kvtransfer.lru_k import LruK


def _ignore(name: bytes) -> None:
    """For whom nobody watches."""


class Shelf:
    """At most ``max_bytes``, pinned ones included; evicts by LRU-2. A pin outlives its block's absence."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._sizes: dict[bytes, int] = {}
        self._order = LruK(2)
        self._pins: set[bytes] = set()
        self._pinned_bytes = 0
        self._bytes = 0
        self._entered: Callable[[bytes], None] = _ignore
        self._left: Callable[[bytes], None] = _ignore

    def watch(self, entered: Callable[[bytes], None], left: Callable[[bytes], None]) -> None:
        """Have these called with the name of each block that comes or goes from now on."""
        self._entered, self._left = entered, left

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    @property
    def bytes(self) -> int:
        return self._bytes

    def size(self, name: bytes) -> int:
        """Bytes of a block that is here, else 0."""
        return self._sizes.get(name, 0)

    def add(self, name: bytes, size: int) -> list[bytes] | None:
        """Make a place for a new block; returns whom it drove out. None: there is no place beside the pinned ones."""
        if self._pinned_bytes + size > self.max_bytes:
            return None
        evicted: list[bytes] = []
        while self._bytes + size > self.max_bytes:
            victim = self._order.victim()
            assert victim is not None, "unpinned bytes without an unpinned block"
            self.remove(victim)
            evicted.append(victim)
        self._sizes[name] = size
        self._bytes += size
        self._order.use(name)
        if name in self._pins:
            self._hold(name)
        self._entered(name)
        return evicted

    def use(self, names: Iterable[bytes]) -> None:
        """These were asked for, in this order; names that are not here count for nothing."""
        for name in names:
            if name in self._sizes:
                self._order.use(name)

    def remove(self, name: bytes) -> None:
        size = self._sizes.pop(name, None)
        if size is None:
            return
        self._bytes -= size
        if name in self._pins:
            self._pinned_bytes -= size
        self._order.forget(name)
        self._left(name)

    def pin(self, names: Iterable[bytes]) -> None:
        """Never evict these, now or when they come."""
        for name in names:
            if name not in self._pins:
                self._pins.add(name)
                if name in self._sizes:
                    self._hold(name)

    def unpin(self, names: Iterable[bytes]) -> None:
        for name in names:
            if name in self._pins:
                self._pins.remove(name)
                self._pinned_bytes -= self.size(name)
                self._order.unpin(name)

    def _hold(self, name: bytes) -> None:
        self._pinned_bytes += self._sizes[name]
        self._order.pin(name)
