"""Which peers exist and which prefix blocks each of them holds. Pure but for the injected clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.clock import Clock
from baton.core.errors import TransferRejected
from baton.core.types import KvHandshake


@dataclass(slots=True)
class _Catalogue:
    """The blocks of one worker's life, least recently published or asked for first."""

    epoch: int
    sequence: int
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])


@dataclass(frozen=True, slots=True)
class _Peer:
    handshake: KvHandshake
    address: str
    announced: float


class Directory:
    """Implements ``DirectoryApi``. Soft state: whatever is lost here is announced or published again.

    At most ``max_blocks`` hashes are kept; beyond that the worker with the most loses its oldest. Forgetting makes
    ``holders`` answer less, never something wrong.
    """

    def __init__(self, clock: Clock, *, max_blocks: int, peer_lease_seconds: float) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._lease = peer_lease_seconds
        self._peers: dict[str, _Peer] = {}
        self._catalogues: dict[str, _Catalogue] = {}
        self._size = 0

    @property
    def blocks(self) -> int:
        """Hashes kept, of all workers together."""
        return self._size

    async def announce(self, peer: KvHandshake, address: str) -> None:
        known = self._catalogues.get(peer.worker_id)
        if known is not None and known.epoch != peer.epoch:
            self._forget(peer.worker_id)
        self._peers[peer.worker_id] = _Peer(peer, address, self._clock.now())
        self._expire()

    async def publish(
        self, worker_id: str, epoch: int, sequence: int, added: Sequence[bytes], removed: Sequence[bytes]
    ) -> bool:
        catalogue = self._catalogues.get(worker_id)
        if catalogue is None or catalogue.epoch != epoch or sequence != catalogue.sequence + 1:
            return False
        catalogue.sequence = sequence
        self._remove(catalogue, removed)
        self._add(catalogue, added)
        return True

    async def reset(self, worker_id: str, epoch: int, sequence: int, held: Sequence[bytes]) -> None:
        peer = self._peers.get(worker_id)
        if peer is None or peer.handshake.epoch != epoch:
            raise TransferRejected(f"worker {worker_id} with epoch {epoch} has not announced itself")
        self._forget(worker_id)
        catalogue = self._catalogues[worker_id] = _Catalogue(epoch, sequence)
        self._add(catalogue, held)

    async def holders(self, hashes: Sequence[bytes]) -> dict[str, int]:
        self._expire()
        counts = {worker_id: _leading(catalogue, hashes) for worker_id, catalogue in self._catalogues.items()}
        return {worker_id: count for worker_id, count in counts.items() if count}

    async def peers(self) -> Sequence[tuple[KvHandshake, str]]:
        self._expire()
        return [(peer.handshake, peer.address) for peer in self._peers.values()]

    def _add(self, catalogue: _Catalogue, hashes: Sequence[bytes]) -> None:
        for block in hashes:
            if block not in catalogue.blocks:
                catalogue.blocks[block] = None
                self._size += 1
        while self._size > self._max_blocks:
            largest = max(self._catalogues.values(), key=lambda each: len(each.blocks))
            largest.blocks.popitem(last=False)
            self._size -= 1

    def _remove(self, catalogue: _Catalogue, hashes: Sequence[bytes]) -> None:
        for block in hashes:
            if block in catalogue.blocks:
                del catalogue.blocks[block]
                self._size -= 1

    def _forget(self, worker_id: str) -> None:
        catalogue = self._catalogues.pop(worker_id, None)
        if catalogue is not None:
            self._size -= len(catalogue.blocks)

    def _expire(self) -> None:
        oldest = self._clock.now() - self._lease
        for worker_id in [key for key, peer in self._peers.items() if peer.announced < oldest]:
            del self._peers[worker_id]
            self._forget(worker_id)


def _leading(catalogue: _Catalogue, hashes: Sequence[bytes]) -> int:
    """How many leading ``hashes`` the worker holds; each of them counts as used."""
    count = 0
    for block in hashes:
        if block not in catalogue.blocks:
            break
        catalogue.blocks.move_to_end(block)
        count += 1
    return count
