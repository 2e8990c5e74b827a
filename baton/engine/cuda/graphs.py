"""Decode steps by batch size: each can be launched kernel by kernel, or captured once and replayed as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cuda.attention import DecodeAttention
from baton.engine.cuda.decoder import CudaDecoder, StepRows
from baton.engine.cuda.step_arrays import StepArrays

DrawTokens = Callable[[torch.Tensor, torch.Tensor], None]
"""Draws from logits [rows, vocab] of the tokens at int32 positions [rows]; none where the position is negative."""


class DecodeStep:
    """A decode batch padded to ``bucket`` rows: token ids in, logits and drawn tokens out, at addresses that never
    change."""

    def __init__(
        self,
        decoder: CudaDecoder,
        pool: torch.Tensor,
        arrays: StepArrays[torch.Tensor],
        attention: DecodeAttention,
        draw: DrawTokens,
    ) -> None:
        self.bucket = attention.rows
        self._decoder = decoder
        self._pool = pool
        self._attention = attention
        self._draw = draw
        bucket = self.bucket
        self._rows = StepRows(
            arrays.row_token_ids[:bucket],
            arrays.row_sources[:bucket],
            arrays.row_positions[:bucket],
            arrays.row_slots[:bucket],
        )
        self._q = decoder.activations.qkv[:bucket, : decoder.spec.q_size]
        self._mixed = decoder.activations.mixed[:bucket]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    def plan(self, row_pages: NDArray[np.int32]) -> None:
        """Cut up the attention of the next ``launch`` or ``replay``, or of ``attend`` in a step with chunks."""
        self._attention.plan(row_pages)

    def attend(self, layer: int) -> None:
        """The batch's attention in one layer. In a step with chunks it spoils up to ``bucket`` rows of the result, so
        the chunks' own attention must come after it."""
        self._attention.run(layer, self._q, self._mixed)

    def launch(self) -> torch.Tensor:
        """Compute the logits kernel by kernel: bf16 [bucket, vocab]. Draws nothing."""
        return self._decoder.decode(self._rows, self._pool, self.attend)

    def capture(self, memory: Any) -> None:
        """Record the whole step as a graph, whose own allocations come from the pool ``memory``."""
        self._launch_and_draw()  # whatever loads or sets itself up at first use must do so outside the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self._logits = self._launch_and_draw()
        self._graph = graph

    def replay(self) -> torch.Tensor:
        """Compute the logits and draw, by the captured graph."""
        if self._graph is None or self._logits is None:
            return self._launch_and_draw()
        self._graph.replay()
        return self._logits

    def _launch_and_draw(self) -> torch.Tensor:
        logits = self.launch()
        self._draw(logits, self._rows.positions)
        return logits
