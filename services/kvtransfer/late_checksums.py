"""Blocks that are stored before their checksums have come. Pure."""

from __future__ import annotations

from itertools import repeat

from baton.core.errors import TransferRejected
from baton.core.types import KvChunk, KvConfirmation
from services.kvtransfer.checksum import mismatch
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
        for block, checksum in zip(range(first, first + count), checksums or repeat(b"", count), strict=True):
            found = self._found.get(block)
            if found is not None and not checksum:
                raise TransferRejected(f"checksums: block {block} was offered without, and none came")
            if found is not None and found != checksum:
                raise mismatch(block, when="as stored")
