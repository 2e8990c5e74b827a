"""Blocks that are stored before their checksums have come. Pure."""

from __future__ import annotations

from baton.core.errors import TransferRejected
from baton.core.types import KvChunk, KvConfirmation
from services.kvtransfer.checksum import compare
from services.kvtransfer.transport import Digests


class LateChecksums:
    """Of one ticket. Keeps the digests of what was stored until the confirmation brings what they must equal."""

    def __init__(self) -> None:
        self._found: dict[int, bytes] = {}  # by the block's ordinal

    def stored(self, chunk: KvChunk, found: Digests | None) -> None:
        """The chunk's blocks are stored; ``found`` None: and verified."""
        for index, block in enumerate(range(chunk.first_block, chunk.first_block + chunk.block_count)):
            if found is None:
                self._found.pop(block, None)
            else:
                self._found[block] = found[index]

    def verify(self, confirmation: KvConfirmation) -> None:
        """CorruptTransfer naming the first block that is not what its checksum was made from, TransferRejected one that
        has none."""
        first, count, checksums = confirmation.first_block, confirmation.block_count, confirmation.checksums
        if checksums and len(checksums) != count:
            raise TransferRejected(f"checksums: one for each of {count} blocks is required, got {len(checksums)}")
        offered = range(first, first + count)
        lacking = [each for each in self._found if each in offered and not (checksums and checksums[each - first])]
        if lacking:
            raise TransferRejected(f"checksums: block {min(lacking)} was offered without, and none came")
        # Blocks that are verified already are equal to whatever is said of them.
        found = [self._found.get(block, checksum) for block, checksum in enumerate(checksums, first)]
        compare(found, first, checksums, when="as stored")
