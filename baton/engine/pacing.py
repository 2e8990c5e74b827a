"""How long steps take, as measured of late, and how much of a prompt fits into one in which others decode. Pure.

A step's time is taken to be that of its decode rows plus so much for each token of a prompt. Both are learned from the
steps themselves, so a budget follows the model, the machine, the batch and the contexts in it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

LEARNING = 0.25  # weight of the newest step
WHOLE_WEIGHT_TOKENS = 512  # of prompts in a step; fewer teach less, for what every step costs weighs more in them
# Fewer, or less than this share of what a step has room for, say only how cheap a token is at most: every step costs
# something.
TELLING_TOKENS = 256
TELLING_SHARE = 1 / 8
OUTLIER = 2.0  # a step that was this many times too slow was held up by something else
UNMEASURED_TOKENS = 256  # of prompts, in a step beside rows, before any chunk has been measured
LEAST_TOKENS = 64  # the same, when the rows alone take too long: prompts go on, slowly
TILE_ROWS = 128  # of a step: a GPU's products take as long for any number up to the next multiple


class _Launch(NamedTuple):
    at: float
    rows: int
    chunk_tokens: int


class StepPace:
    """``target_seconds``: what a step with decode rows should take at most, 0: whatever it takes; ``most``: tokens that
    a step has room for."""

    def __init__(self, target_seconds: float, most: int) -> None:
        self._target = target_seconds
        self._most = most
        self._telling = min(TELLING_TOKENS, int(TELLING_SHARE * most))
        self._token_seconds = 0.0  # for each token of a prompt; 0: not measured yet
        self._launches: deque[_Launch] = deque()  # steps in flight
        self._landed_at = 0.0
        self.row_seconds = 0.0
        """A step of decode rows alone; 0: not measured yet."""

    def launched(self, rows: int, tokens: int, now: float) -> None:
        """A step of ``rows`` decode rows and ``tokens`` of prompts; ``landed`` follows for each, in order."""
        self._launches.append(_Launch(now, rows, tokens))

    def landed(self, now: float) -> None:
        """The oldest step has been computed. It took the time since it was launched, or since the one before it
        landed."""
        launch = self._launches.popleft()
        self.learn(launch.rows, launch.chunk_tokens, now - max(launch.at, self._landed_at))
        self._landed_at = now

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of ``rows`` decode rows and ``tokens`` of prompts has taken ``seconds``."""
        if seconds <= 0:
            return
        # With prompts in it a step takes no less than rows alone, so one that did says that they have become faster:
        # where prompts never end, no other step would.
        if not tokens or (rows and seconds < self.row_seconds):
            self.row_seconds = _moved(self.row_seconds, _believed(seconds, self.row_seconds), LEARNING)
        if not tokens:
            return
        # Rows that have grown many since they were last measured alone must not eat up the whole step.
        own = max(seconds - self.row_seconds, seconds / 4) if rows else seconds
        self._learn_price(own / tokens, tokens)

    def _learn_price(self, seconds: float, tokens: int) -> None:
        """Each of ``tokens`` tokens took ``seconds``, or less if they were few."""
        known = self._token_seconds
        if tokens < self._telling and (not known or seconds >= known):
            return
        seen = _believed(seconds, known)
        self._token_seconds = _moved(known, seen, LEARNING * min(1.0, tokens / WHOLE_WEIGHT_TOKENS))

    def chunk_tokens(self, rows: int) -> int:
        """How many tokens of prompts a step may have beside ``rows`` decode rows."""
        if not rows or not self._target:
            return self._most
        if not self._token_seconds:
            return min(UNMEASURED_TOKENS, self._most)
        fitting = int((self._target - self.row_seconds) / self._token_seconds)
        return min(max(_whole_tiles(rows, fitting), LEAST_TOKENS), self._most)

    def prompt_tokens_per_second(self, rows: int) -> float:
        """How fast a prompt would be computed beside ``rows`` decode rows; 0: not measured yet."""
        if not self._token_seconds:
            return 0.0
        if not rows:
            return 1 / self._token_seconds
        tokens = self.chunk_tokens(rows)
        return tokens / (self.row_seconds + tokens * self._token_seconds)


def _whole_tiles(rows: int, tokens: int) -> int:
    """As many of ``tokens`` as fill up the last tile that they and ``rows`` would reach; all of them in the first."""
    total = rows + tokens
    return tokens if total < TILE_ROWS else total - total % TILE_ROWS - rows


def _believed(seen: float, known: float) -> float:
    return min(seen, OUTLIER * known) if known else seen


def _moved(before: float, seen: float, weight: float) -> float:
    return before + weight * (seen - before) if before else seen
