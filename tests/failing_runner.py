"""A runner some of whose results are failures, although all of the KV was computed and perhaps handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.core.errors import BatonError
from baton.engine.runner import Part, PartDetail, Runner, StepResult
from tests.runner_around import RunnerAround

Wanted = Callable[[Part], bool]


def nobody(_: Part) -> bool:
    return False


def ends_at(tokens: int) -> Wanted:
    """Parts that compute the context up to there."""
    return lambda part: part.end == tokens


class FailingRunner(RunnerAround):
    """Parts that ``fails`` is true of when they are collected fail with ``error``."""

    def __init__(self, inner: Runner, fails: Wanted = nobody, error: BatonError | None = None) -> None:
        super().__init__(inner)
        self.fails = fails
        self._error = error or BatonError("broken")
        self._flights: deque[Sequence[Part]] = deque()

    def launch(self, parts: Sequence[Part]) -> None:
        super().launch(parts)
        self._flights.append(parts)

    def collect(self) -> StepResult:
        result, parts = super().collect(), self._flights.popleft()
        failed = {index: PartDetail(error=self._error) for index, part in enumerate(parts) if self.fails(part)}
        tokens = [None if index in failed else token for index, token in enumerate(result.token_ids)]
        return StepResult(tokens, {**result.details, **failed})
