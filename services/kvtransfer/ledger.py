"""Which blocks a cache tier holds, and how that changed: what workers keep a copy of. Pure."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from baton.core.types import TierChanges

GONE_KEPT = 65_536  # names that left; who has not asked since longer than that gets everything


class Ledger:
    """``epoch``: of the tier's life; versions count up within one."""

    def __init__(self, epoch: int, gone_kept: int = GONE_KEPT) -> None:
        self._epoch = epoch
        self._kept = gone_kept
        self._levels: dict[bytes, int] = {}  # on how many levels a block is
        self._held: dict[bytes, int] = {}  # version at which it came, in that order
        self._gone: OrderedDict[bytes, int] = OrderedDict()  # version at which it went, in that order
        self._version = 0
        self._oldest = 0  # from here on nothing has been forgotten of ``_gone``

    def entered(self, name: bytes) -> None:
        """The block is on one more level."""
        levels = self._levels[name] = self._levels.get(name, 0) + 1
        if levels == 1:
            self._version += 1
            self._held[name] = self._version
            self._gone.pop(name, None)

    def left(self, name: bytes) -> None:
        """The block is on one level less."""
        self._levels[name] -= 1
        if self._levels[name]:
            return
        self._version += 1
        del self._levels[name], self._held[name]
        self._gone[name] = self._version
        if len(self._gone) > self._kept:
            _, self._oldest = self._gone.popitem(last=False)

    def since(self, epoch: int, version: int) -> TierChanges:
        """What came and went after ``version``; all that is held for who asks for the first time or after too long."""
        if epoch != self._epoch or not self._oldest <= version <= self._version:
            return TierChanges(self._epoch, self._version, True, tuple(self._held), ())
        return TierChanges(self._epoch, self._version, False, _after(self._held, version), _after(self._gone, version))


def _after(versions: dict[bytes, int], version: int) -> tuple[bytes, ...]:
    return tuple(name for name, _ in takewhile(lambda entry: entry[1] > version, reversed(versions.items())))
