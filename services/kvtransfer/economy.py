"""Whether a prefix is had sooner from the cache tier than by computing it. Pure; learns both rates as it is told."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest observation in a rate
LEAST_TOKENS = 128  # a computation of fewer says more about waiting than about computing
LEAST_SECONDS = 0.001  # what seems to take less was under way before anybody looked at the clock
LEAST_BYTES = 256 * 1024


class FetchEconomy:
    """Starts from the given rates, which are settings; the first observation replaces one, later ones move it."""

    def __init__(self, *, bytes_per_second: float, tokens_per_second: float, min_tokens: int) -> None:
        """Prefixes of fewer than ``min_tokens`` are never worth a call."""
        self.bytes_per_second = bytes_per_second
        self.tokens_per_second = tokens_per_second
        self._min_tokens = min_tokens
        self._has_moved = self._has_computed = False

    def moved(self, byte_count: int, seconds: float) -> None:
        """So many bytes came from the tier, or went to it, in so many seconds."""
        if byte_count >= LEAST_BYTES and seconds > 0:
            weight = WEIGHT if self._has_moved else 1.0
            self.bytes_per_second += weight * (byte_count / seconds - self.bytes_per_second)
            self._has_moved = True

    def computed(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed in so many seconds, beside whatever else the engine did."""
        if tokens >= LEAST_TOKENS and seconds >= LEAST_SECONDS:
            weight = WEIGHT if self._has_computed else 1.0
            self.tokens_per_second += weight * (tokens / seconds - self.tokens_per_second)
            self._has_computed = True

    def fetch_seconds(self, byte_count: int) -> float:
        return byte_count / self.bytes_per_second

    def compute_seconds(self, tokens: int) -> float:
        return tokens / self.tokens_per_second

    def pays(self, tokens: int, byte_count: int) -> bool:
        """Fetching ``byte_count`` bytes beats computing the ``tokens`` that they stand for."""
        return tokens >= self._min_tokens and self.fetch_seconds(byte_count) < self.compute_seconds(tokens)
