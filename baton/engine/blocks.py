"""Who owns which KV block: free list, reference counts and the prefix cache. Pure bookkeeping, no bytes.

A block is in exactly one of three states, so ``free + held + cached = total`` always:

* *held*: at least one live sequence refers to it (shared blocks count once), or a launched step may still touch it;
* *cached*: nobody refers to it, but its content has a name (a chained hash) and may be found again; evicted when blocks
  run short, in the order that ``eviction.py`` keeps;
* *free*: its content means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.types import CacheClass
from baton.engine.eviction import EvictionOrder


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Hashes that entered and left the prefix cache since change ``sequence - 1``. A gap means: read all anew."""

    sequence: int
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for one sequence, in order; the first ``hits`` are shared prefix blocks and must not be written."""

    blocks: list[int]
    hits: int


class BlockPool:
    """The blocks of one KV cache. Not thread-safe: it belongs to the engine's one thread."""

    def __init__(self, total: int, most_kept: int = 0) -> None:
        """``most_kept``: cached blocks of class keep that go after all normal ones."""
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._hash_of: list[bytes | None] = [None] * total
        self._block_of: dict[bytes, int] = {}
        self._idle = EvictionOrder(most_kept)  # cached, nobody refers to them
        self._fenced: dict[int, int] = {}  # nobody refers to them, but this launched step may still touch them
        self._held = 0
        self._launched = 0
        self._finished = 0
        self._pending: dict[bytes, bool] = {}  # net change since the last BlockChange: added or removed
        self._sequence = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._idle)

    @property
    def kept(self) -> int:
        """Of the cached blocks, those of class keep."""
        return self._idle.kept

    @property
    def held(self) -> int:
        return self._held

    @property
    def fenced(self) -> int:
        """Held blocks that nobody refers to: they become available when the steps in flight have finished."""
        return len(self._fenced)

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._idle)

    def allocate(self, hashes: Iterable[bytes], count: int) -> Allocation | None:
        """``count`` blocks of which as many leading ones as possible are cached under ``hashes``; None: too few."""
        shared = self.found(hashes)
        if self._shortage(shared, count) > 0:
            return None
        for block in shared:
            self._hold(block)
        return Allocation(shared + self._take(count - len(shared)), len(shared))

    def can_allocate(self, hashes: Iterable[bytes], count: int) -> bool:
        """Whether ``allocate`` would succeed now."""
        return count <= self.available or self.shortage(hashes, count) <= 0

    def shortage(self, hashes: Iterable[bytes], count: int) -> int:
        """How many blocks ``allocate`` lacks now; 0 or less: none."""
        return self._shortage(self.found(hashes), count)

    def exclusive(self, blocks: Iterable[int]) -> int:
        """How many of a live sequence's blocks nobody else refers to."""
        return sum(self._references[block] == 1 for block in blocks)

    def grow(self) -> int | None:
        """One more block, or None when every block is held."""
        return self._take(1)[0] if self.available else None

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of ``blocks``, which are in sequence order.

        The last block goes first, so that eviction takes a prefix's tail before its head. While a step is in flight a
        block without references stays held until that step has finished: the step may still write to it.
        """
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._launched > self._finished:
                self._fenced[block] = self._launched
            else:
                self._retire(block)

    def launch(self, step: int) -> None:
        """Step ``step`` (counted from 1) now runs; it may touch every block that is referenced at this moment."""
        self._launched = step

    def finish(self, step: int) -> None:
        """All steps up to ``step`` have finished."""
        self._finished = step
        done = [block for block, last in self._fenced.items() if last <= step]
        for block in done:
            del self._fenced[block]
            self._retire(block)

    def publish(self, block: int, content: bytes, cache_class: CacheClass = CacheClass.NORMAL) -> None:
        """Name a full, confirmed block. When another block has the name already, this one stays private, and what class
        keep asks for is done to the other one."""
        if content not in self._block_of and self._hash_of[block] is None:
            self._block_of[content] = block
            self._hash_of[block] = content
            self._note(content, added=True)
        if cache_class is CacheClass.KEEP and content in self._block_of:
            self._idle.keep(self._block_of[content])

    def keep(self, blocks: Iterable[int]) -> None:
        """Blocks with names are of class keep from now on."""
        for block in blocks:
            self._idle.keep(block)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Take names away from blocks whose content is in doubt; nobody can find them any more."""
        for block in blocks:
            self._forget(block)
            if block in self._idle:
                self._idle.remove(block)
                self._free.append(block)

    def leading(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the leading ``names`` that are in the prefix cache. Nothing is held: use them at once."""
        return self.found(names)

    def names(self) -> tuple[bytes, ...]:
        """Every hash in the prefix cache, as of the last change plus what is pending."""
        return tuple(self._block_of)

    def take_change(self) -> BlockChange | None:
        """What changed in the prefix cache since the last call; None when nothing did."""
        if not self._pending:
            return None
        self._sequence += 1
        added = tuple(name for name, is_added in self._pending.items() if is_added)
        removed = tuple(name for name, is_added in self._pending.items() if not is_added)
        self._pending.clear()
        return BlockChange(self._sequence, added, removed)

    def found(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that ``allocate`` would share: those of as many leading hashes as are known."""
        found: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def _shortage(self, shared: Sequence[int], count: int) -> int:
        idle = sum(block in self._idle for block in shared)  # to be held by this very request: not available to it
        return count - len(shared) - (self.available - idle)

    def _hold(self, block: int) -> None:
        if block in self._idle:
            self._idle.remove(block)
            self._held += 1
        self._fenced.pop(block, None)
        self._references[block] += 1

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count:
            block = self._idle.evict()
            self._forget(block)
            self._free.append(block)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        self._held += count
        return taken

    def _retire(self, block: int) -> None:
        self._held -= 1
        if self._hash_of[block] is None:
            self._free.append(block)
        else:
            self._idle.add(block)

    def _forget(self, block: int) -> None:
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            self._idle.forget(block)
            del self._block_of[content]
            self._note(content, added=False)

    def _note(self, content: bytes, *, added: bool) -> None:
        if self._pending.get(content, added) != added:
            del self._pending[content]  # came and went, or went and came back: nothing has changed
        else:
            self._pending[content] = added
