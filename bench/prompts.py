"""Prompts of random ids, the same for a seed on every machine. No two share a first block: nothing is a prefix hit."""

from __future__ import annotations

from collections import Counter

import numpy as np

from bench.arrivals import Arrival
from bench.shapes import Range


class RandomPrompts:
    """Draws prompts and lengths one after the other, so that a second repeat never meets the prompts of the first."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._seed = seed
        self._begun: Counter[str] = Counter()

    def begin(self, name: str) -> None:
        """What is drawn from now on depends on the seed, ``name`` and how often it has begun, and on nothing else."""
        self._random = np.random.default_rng((self._seed, self._begun[name], *name.encode()))
        self._begun[name] += 1

    def ids(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._vocab_size, length).tolist())

    def length(self, lengths: Range) -> int:
        return int(self._random.integers(lengths.low, lengths.high, endpoint=True))


class ArrivalPrompts:
    """The prompt of each arrival, from the seed and the arrival's number alone, so that processes can share a run.

    An arrival with ``blocks`` repeats their ids: prompts that begin with the same blocks begin with the same tokens.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def ids(self, number: int, arrival: Arrival) -> tuple[int, ...]:
        ids: list[int] = []
        for block in arrival.blocks:
            ids += self._draw((1, block), arrival.block_tokens)
        del ids[arrival.prompt :]
        return tuple(ids + self._draw((0, number), arrival.prompt - len(ids)))

    def _draw(self, key: tuple[int, int], length: int) -> list[int]:
        return np.random.default_rng((self._seed, *key)).integers(0, self._vocab_size, length).tolist()
