"""Offers as a faulty sender or network would make them, whatever the transport."""

from __future__ import annotations

from dataclasses import replace

from baton.core.types import KvChunk


def swapped(chunk: KvChunk) -> KvChunk:
    """The first two blocks in each other's place."""
    if chunk.source is not None:
        first, second, *rest = chunk.source.blocks
        return replace(chunk, source=replace(chunk.source, blocks=(second, first, *rest)))
    size = len(chunk.payload) // chunk.block_count
    return replace(chunk, payload=chunk.payload[size : 2 * size] + chunk.payload[:size] + chunk.payload[2 * size :])


def with_last_block_of(chunk: KvChunk, other: KvChunk) -> KvChunk:
    """The chunk with the last block of another one of the same size."""
    if chunk.source is not None and other.source is not None:
        return replace(chunk, source=replace(chunk.source, blocks=chunk.source.blocks[:-1] + other.source.blocks[-1:]))
    size = len(chunk.payload) // chunk.block_count
    return replace(chunk, payload=chunk.payload[:-size] + other.payload[-size:])
