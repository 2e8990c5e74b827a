"""The shared cache tier: named KV blocks outside of any worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierBlock:
    """One full KV block under its chained hash. ``checksum`` is its 128-bit digest, made where it was computed.

    ``graph_version`` tags a block whose content came from a version of the retrieval graph; empty: from none.
    """

    name: bytes
    payload: bytes
    checksum: bytes
    graph_version: str = ""


@dataclass(frozen=True, slots=True)
class TierChanges:
    """Names that came into a tier and left it since an earlier version, up to this one; with ``is_all`` those ``added``
    are all that it holds. Versions count within one ``epoch``."""

    epoch: int
    version: int
    is_all: bool
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot of one tier. ``hits`` and ``misses`` count blocks that workers asked for; counters only grow."""

    memory_blocks: int = 0
    memory_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    pinned_blocks: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    disk_errors: int = 0
