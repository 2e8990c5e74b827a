"""Offers as a faulty sender or network would make them, whatever the transport."""

from __future__ import annotations

from dataclasses import replace

from baton.core.types import KvChunk


def swapped(chunk: KvChunk) -> KvChunk:
    """The first two blocks in each other's place, where there are two."""
    if chunk.block_count < 2:
        return chunk
    if chunk.source is not None:
        first, second, *rest = chunk.source.blocks
        return replace(chunk, source=replace(chunk.source, blocks=(second, first, *rest)))
    body, size = bytes(chunk.body), len(chunk.body) // chunk.block_count
    return replace(chunk, payload=body[size : 2 * size] + body[:size] + body[2 * size :], pieces=())


def with_last_block_of(chunk: KvChunk, other: KvChunk) -> KvChunk:
    """The chunk with the last block of another one of the same size."""
    if chunk.source is not None and other.source is not None:
        return replace(chunk, source=replace(chunk.source, blocks=chunk.source.blocks[:-1] + other.source.blocks[-1:]))
    body, last, size = bytes(chunk.body), bytes(other.body), len(chunk.body) // chunk.block_count
    return replace(chunk, payload=body[:-size] + last[-size:], pieces=())
