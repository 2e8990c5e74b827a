"""Which cached block goes first when blocks run short. Pure.

A segmented LRU (Karedla, Love and Wherry 1994, "Caching strategies to improve disk system performance") whose protected
segment is filled by what requests ask for, not by hits: blocks of class ``keep`` go after all normal ones, the least
recently used first in both. What the protected segment has no room for joins the normal ones as their youngest, so
whoever keeps much pushes out what was kept before, and never takes more than the bound from those who keep nothing.
"""

from __future__ import annotations

from collections import OrderedDict


class EvictionOrder:
    """Blocks that nobody refers to, and of every block whether it is of class keep."""

    def __init__(self, most_kept: int) -> None:
        self._most_kept = most_kept
        self._normal: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first, ``most_kept`` at most
        self._keeps: set[int] = set()  # the blocks of class keep, those in use too

    def __len__(self) -> int:
        return len(self._normal) + len(self._kept)

    def __contains__(self, block: int) -> bool:
        return block in self._normal or block in self._kept

    @property
    def kept(self) -> int:
        """Blocks here that go after all normal ones."""
        return len(self._kept)

    def keep(self, block: int) -> None:
        """The block is of class keep from now on. One that is here already counts as used just now."""
        self._keeps.add(block)
        if block in self:
            self.remove(block)
            self.add(block)

    def forget(self, block: int) -> None:
        """The block's content, and with it its class, means nothing any more."""
        self._keeps.discard(block)

    def add(self, block: int) -> None:
        """Nobody refers to the block any more: it is the youngest of its class."""
        if block not in self._keeps:
            self._normal[block] = None
            return
        self._kept[block] = None
        if len(self._kept) > self._most_kept:
            oldest, _ = self._kept.popitem(last=False)
            self._keeps.discard(oldest)
            self._normal[oldest] = None

    def remove(self, block: int) -> None:
        """A block that is here is in use again."""
        del (self._normal if block in self._normal else self._kept)[block]

    def evict(self) -> int:
        """Take out the block that goes first; KeyError when there is none."""
        block, _ = (self._normal or self._kept).popitem(last=False)
        return block
