"""A runner that a test stops in the middle of a step: its KV is written and told of, its results are to come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from baton.engine.runner import Part, Runner, StepResult
from tests.gates import GENEROUS_SECONDS
from tests.runner_around import RunnerAround


class HeldRunner(RunnerAround):
    """Holds each step with the last chunk of a prompt until it is released, for good."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._ends_prompt: deque[bool] = deque()  # of the steps in flight
        self._open = threading.Event()

    def launch(self, parts: Sequence[Part]) -> None:
        super().launch(parts)
        self._ends_prompt.append(any(part.draw is not None and part.end - part.start > 1 for part in parts))

    def while_waiting(self, look: Callable[[], None]) -> None:
        def look_and_wait() -> None:
            look()
            if self._ends_prompt[0] and self.has_filled():
                assert self._open.wait(GENEROUS_SECONDS), "nobody released the step"

        super().while_waiting(look_and_wait)

    def collect(self) -> StepResult:
        result = super().collect()
        self._ends_prompt.popleft()
        return result

    def release(self) -> None:
        self._open.set()
