"""What a computation must cost at least, from the model's shape: how near a measurement comes to the hardware.

Three pieces, each bounded by the slower of arithmetic and memory:

- linear layers: ``2 x weights`` FLOPs a row; the weights are read once a step (of a mixture, the experts that rows
  choose evenly at random: ``E x (1 - (1 - k / E) ^ rows)``). The head is computed for rows that draw a token only. The
  embedding is a look-up and counts nothing.
- attention of prompts: ``4 x heads x head_dim`` FLOPs for each pair of positions (causal: ``n (n + 1) / 2`` pairs, or
  fewer under a sliding window), and the bytes of KV written once.
- attention of decode rows: the same FLOPs a pair, and the bytes of all KV of the context read once a step.

MFU = FLOPs / (seconds x peak FLOP/s). MBU = bytes / (seconds x peak bytes/s). The roofline fraction is the sum of the
pieces' least times over the measured one. Norms, rotary embedding, activations and sampling are counted as free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Peak:
    """What the hardware reaches at best, as measured: bytes/s of memory (read + write) and FLOP/s of matmul."""

    bytes_per_second: float
    flops_per_second: float


H200 = Peak(bytes_per_second=4.26e12, flops_per_second=768e12)  # device copy; bf16 matmul of 8192 x 8192 x 8192


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations of one kind; arithmetic and memory traffic may overlap inside it, but not with other pieces."""

    flops: float
    bytes: float

    def seconds(self, peak: Peak) -> float:
        return max(self.flops / peak.flops_per_second, self.bytes / peak.bytes_per_second)


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: ``prompt`` tokens in, ``output`` tokens out."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Work:
    """All that a measurement computed."""

    pieces: tuple[Piece, ...]

    def fractions(self, seconds: float, peak: Peak) -> dict[str, float]:
        """``mfu``, ``mbu`` and ``roofline`` of this work done in ``seconds``."""
        flops, traffic = sum(p.flops for p in self.pieces), sum(p.bytes for p in self.pieces)
        return {
            "mfu": flops / (seconds * peak.flops_per_second),
            "mbu": traffic / (seconds * peak.bytes_per_second),
            "roofline": sum(p.seconds(peak) for p in self.pieces) / seconds,
        }


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The work of one model. ``weight_bytes``: a weight's size; ``kv_bytes``: of one token in all layers."""

    spec: DecoderSpec
    weight_bytes: float
    kv_bytes: float

    def requests(self, requests: Sequence[Lengths], steps: int) -> Work:
        """Whole requests, computed in ``steps`` steps. The last token of an answer is drawn, but not computed."""
        rows = sum(r.prompt + r.output - 1 for r in requests)
        draws = sum(r.output for r in requests)
        prompt_pairs = sum(self._pairs(0, r.prompt) for r in requests)
        decode_pairs = sum(self._pairs(r.prompt, r.prompt + r.output - 1) for r in requests)
        return Work(
            (
                self._linear(rows, draws, steps),
                Piece(self._attention_flops(prompt_pairs), self.kv_bytes * sum(r.prompt for r in requests)),
                Piece(self._attention_flops(decode_pairs), self.kv_bytes * decode_pairs),
            )
        )

    def decode_step(self, rows: int, context: float) -> Work:
        """One step of ``rows`` decode rows whose contexts have ``context`` tokens on average."""
        pairs = rows * (context if self.spec.sliding_window is None else min(context, self.spec.sliding_window))
        return Work((self._linear(rows, rows, 1), Piece(self._attention_flops(pairs), self.kv_bytes * pairs)))

    def _linear(self, rows: float, draws: float, steps: int) -> Piece:
        spec, moe = self.spec, self.spec.moe
        dense = spec.layers * (spec.hidden_size * (spec.q_size + 2 * spec.kv_size) + spec.q_size * spec.hidden_size)
        head = spec.vocab_size * spec.hidden_size
        if moe is None:
            used = read = spec.layers * 3 * spec.hidden_size * spec.ffn_size
        else:
            expert, router = 3 * spec.hidden_size * moe.ffn_size, spec.hidden_size * moe.experts
            touched = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** (rows / max(steps, 1)))
            used = spec.layers * (router + moe.top_k * expert)
            read = spec.layers * (router + touched * expert)
        return Piece(2 * (rows * (dense + used) + draws * head), steps * self.weight_bytes * (dense + read + head))

    def _attention_flops(self, pairs: float) -> float:
        return 4.0 * self.spec.layers * self.spec.q_size * pairs

    def _pairs(self, start: int, end: int) -> int:
        """Pairs of a position in [start, end) with those it attends to: itself and what precedes it in its window."""
        window = self.spec.sliding_window or end
        growing = max(0, min(end, window) - start)  # positions that still see everything before them
        first = start + 1
        return growing * (2 * first + growing - 1) // 2 + (end - start - growing) * window
