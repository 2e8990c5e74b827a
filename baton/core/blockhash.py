"""Chained hashes that name the content of full KV blocks.

A block's hash covers its own tokens and, through its parent's hash, every token before it; the root covers whatever
else decides the bytes: tenant salt, weights, KV format, adapter, execution module. Equal hash means equal KV bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from baton.core.types import ModelCard, Module, TokenRequest

HASH_BYTES = 16


def root_hash(*, salt: bytes, weights_hash: str, kv_format: str, adapter: str = "", module: str = "") -> bytes:
    """The parent of a sequence's first block. ``module``: of execution, where it changes the KV."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"baton-root")
    parts = [salt, weights_hash.encode(), kv_format.encode(), adapter.encode()]
    if module:  # without one the name is the one that it was before there were modules
        parts.append(module.encode())
    for part in parts:
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


def request_root(request: TokenRequest, card: ModelCard) -> bytes:
    """The parent of a request's first block on a worker that serves ``card``."""
    window = request.attention_window
    return root_hash(
        salt=request.salt,
        weights_hash=card.weights_hash,
        kv_format=str(card.format),
        module="" if window is None else f"{Module.ATTENTION_WINDOW} {window}",
    )


def child_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of the full block holding ``tokens`` that follows ``parent``."""
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES, person=b"baton-block")
    digest.update(struct.pack(f"<{len(tokens)}I", *tokens))
    return digest.digest()


def block_hashes(root: bytes, tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Hashes of the full blocks of ``tokens``, in order; a trailing partial block has none."""
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = child_hash(parent, tokens[start : start + block_size])
        yield parent
