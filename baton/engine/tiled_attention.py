"""Paged causal attention in torch, bit-identical for a query whatever else is in the step.

Queries are placed into tiles of ``QUERY_TILE`` rows and keys into tiles of ``KEY_TILE`` rows, both aligned to absolute
position 0 of their sequence. So a query always sits in the same row of a matrix product of the same shape, and its
softmax adds the same key tiles in the same order; tiles past its position add exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from baton.engine import exact
from baton.engine.decoder import PackedStep
from baton.engine.spec import DecoderSpec

QUERY_TILE = 16
KEY_TILE = 64
# Bounds the gathered keys of one batch of query tiles: 16 MiB of float32.
_GATHER_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class _TileBatch:
    """Query tiles that are computed together. ``I`` tiles, each over the first ``key_tiles`` tiles of its sequence."""

    rows: torch.Tensor  # [n] rows of the step
    tile: torch.Tensor  # [n] the query tile (0..I-1) of each row
    slot: torch.Tensor  # [n] the row inside its tile
    block_ids: torch.Tensor  # [I, blocks]
    visible: torch.Tensor  # [I, QUERY_TILE, key_tiles * KEY_TILE] bool
    filled: torch.Tensor  # [I, key_tiles * KEY_TILE] bool: positions whose KV exists
    key_tiles: int


class TiledAttention:
    """Attention of one step over ``pool``: built once, used in every layer."""

    def __init__(self, spec: DecoderSpec, step: PackedStep, pool: torch.Tensor) -> None:
        self._spec = spec
        self._pool = pool
        self._block_size = pool.shape[4]
        device = pool.device
        starts = step.seq_starts.tolist()
        lengths = torch.tensor([end - start for start, end in pairwise(starts)])
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions = step.positions.long()
        self._blocks = step.block_tables.long()[sequence, positions // self._block_size].to(device)
        self._offsets = (positions % self._block_size).to(device)
        self._batches = [self._batch(step, tiles, device) for tiles in self._grouped(_query_tiles(step))]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [rows, kv_heads, head_dim] of the step's rows in their blocks, in the pool's type."""
        self._pool[:, layer, 0][self._blocks, :, self._offsets] = k.to(self._pool.dtype)
        self._pool[:, layer, 1][self._blocks, :, self._offsets] = v.to(self._pool.dtype)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """float32 [rows, q_size]: attention of q [rows, heads, head_dim] over all that has been written."""
        out = torch.empty(q.shape[0], self._spec.q_size, dtype=torch.float32, device=q.device)
        for batch in self._batches:
            out[batch.rows] = self._attend_batch(layer, q[batch.rows].float(), batch)
        return out

    def _attend_batch(self, layer: int, q: torch.Tensor, batch: _TileBatch) -> torch.Tensor:
        """Scores for all key tiles at once; ``a`` is (tile, kv head, key tile), the batch of the matrix products."""
        spec, tiles = self._spec, batch.block_ids.shape[0]
        group = spec.heads // spec.kv_heads
        m = group * QUERY_TILE
        q_tiles = q.new_zeros(tiles, spec.heads, QUERY_TILE, spec.head_dim)
        q_tiles[batch.tile, :, batch.slot] = q * spec.head_dim**-0.5
        q_tiles = q_tiles.view(tiles, spec.kv_heads, 1, m, spec.head_dim)
        keys, values = self._gather(layer, 0, batch), self._gather(layer, 1, batch)
        scores = torch.matmul(q_tiles, keys.transpose(-1, -2))  # [tiles, kv_heads, key_tiles, m, KEY_TILE]
        visible = batch.visible.view(tiles, 1, QUERY_TILE, batch.key_tiles, KEY_TILE).transpose(2, 3)
        by_head = scores.view(tiles, spec.kv_heads, batch.key_tiles, group, QUERY_TILE, KEY_TILE)
        by_head.masked_fill_(~visible[:, :, :, None], float("-inf"))
        peak = scores.amax(dim=(2, 4), keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = exact.exp((scores - peak).view(-1, KEY_TILE)).view(scores.shape)
        mixed = _sum_in_order(torch.matmul(weights, values))
        total = _sum_in_order(weights.sum(dim=-1, keepdim=True))
        mixed = (mixed / total).view(tiles, spec.heads, QUERY_TILE, spec.head_dim)
        return mixed[batch.tile, :, batch.slot].reshape(-1, spec.q_size)

    def _gather(self, layer: int, part: int, batch: _TileBatch) -> torch.Tensor:
        """K (part 0) or V (part 1), float32 [tiles, kv_heads, key_tiles, KEY_TILE, head_dim]."""
        spec = self._spec
        blocks = self._pool[:, layer, part][batch.block_ids].transpose(1, 2)
        rows = blocks.flatten(2, 3)[:, :, : batch.key_tiles * KEY_TILE].float()
        if part == 1:  # a score of an unfilled key is masked, but zero times an unfilled value need not be zero
            rows = rows.masked_fill(~batch.filled[:, None, :, None], 0.0)
        return rows.reshape(-1, spec.kv_heads, batch.key_tiles, KEY_TILE, spec.head_dim)

    def _grouped(self, tiles: list[_QueryTile]) -> list[list[_QueryTile]]:
        """Batches of tiles with about as many keys, cut where the gathered keys would pass the bound."""
        per_key_tile = KEY_TILE * self._spec.kv_size
        groups: list[list[_QueryTile]] = []
        for tile in sorted(tiles, key=lambda tile: tile.key_tiles):
            group = groups[-1] if groups else []
            gathered = (len(group) + 1) * tile.key_tiles * per_key_tile
            if group and gathered <= _GATHER_ELEMENTS and tile.key_tiles <= 2 * group[0].key_tiles:
                group.append(tile)
            else:
                groups.append([tile])
        return groups

    def _batch(self, step: PackedStep, tiles: list[_QueryTile], device: torch.device) -> _TileBatch:
        key_tiles = max(tile.key_tiles for tile in tiles)
        keys = torch.arange(key_tiles * KEY_TILE)
        queries = torch.tensor([tile.index for tile in tiles])[:, None] * QUERY_TILE + torch.arange(QUERY_TILE)
        distance = queries[:, :, None] - keys
        visible = distance >= 0
        if self._spec.sliding_window is not None:
            visible &= distance < self._spec.sliding_window
        if step.windows is not None:
            visible &= distance < step.windows.long()[[tile.sequence for tile in tiles]][:, None, None]
        filled = keys < torch.tensor([tile.last_position + 1 for tile in tiles])[:, None]
        blocks = -(-len(keys) // self._block_size)
        table = step.block_tables.long()[[tile.sequence for tile in tiles]][:, :blocks]
        missing = table.new_zeros(len(tiles), blocks - table.shape[1])
        rows = torch.cat([torch.arange(tile.first_row, tile.last_row + 1) for tile in tiles])
        counts = torch.tensor([tile.last_row + 1 - tile.first_row for tile in tiles])
        return _TileBatch(
            rows=rows.to(device),
            tile=torch.repeat_interleave(torch.arange(len(tiles)), counts).to(device),
            slot=(step.positions.long()[rows] % QUERY_TILE).to(device),
            block_ids=torch.cat((table, missing), dim=1).to(device),
            visible=(visible & filled[:, None, :]).to(device),
            filled=filled.to(device),
            key_tiles=key_tiles,
        )


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """The rows of a step that fall into query tile ``index`` of a sequence."""

    sequence: int
    index: int
    first_row: int
    last_row: int
    last_position: int

    @property
    def key_tiles(self) -> int:
        return self.last_position // KEY_TILE + 1


def _query_tiles(step: PackedStep) -> list[_QueryTile]:
    tiles: list[_QueryTile] = []
    starts = step.seq_starts.tolist()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        shift = int(step.positions[start]) - start
        for index in range((start + shift) // QUERY_TILE, (end - 1 + shift) // QUERY_TILE + 1):
            first = max(start, index * QUERY_TILE - shift)
            last = min(end, (index + 1) * QUERY_TILE - shift) - 1
            tiles.append(_QueryTile(sequence, index, first, last, last + shift))
    return tiles


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Add up [tiles, kv_heads, key_tiles, m, n] over the key tiles, first to last."""
    total = parts[:, :, 0]
    for tile in range(1, parts.shape[2]):
        total = total + parts[:, :, tile]
    return total
