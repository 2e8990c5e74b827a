"""A runner some of whose results are failures, although all of the KV was computed and perhaps handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.core.errors import BatonError
from baton.engine.runner import Part, PartDetail, Runner, StepResult
from tests.runner_around import RunnerAround


class FailsAt(RunnerAround):
    """A part that ends at ``ends_at`` fails with ``error``; None: none does."""

    def __init__(self, inner: Runner, ends_at: int | None, error: BatonError) -> None:
        super().__init__(inner)
        self.ends_at = ends_at
        self._error = error
        self._ends: deque[list[int]] = deque()  # of the parts of the steps in flight

    def launch(self, parts: Sequence[Part]) -> None:
        super().launch(parts)
        self._ends.append([part.end for part in parts])

    def collect(self) -> StepResult:
        result, ends = super().collect(), self._ends.popleft()
        failed = {index: PartDetail(error=self._error) for index, end in enumerate(ends) if end == self.ends_at}
        tokens = [None if index in failed else token for index, token in enumerate(result.token_ids)]
        return StepResult(tokens, {**result.details, **failed})
