"""Prompts are computed beside answers in chunks that keep the TPOT target, and an engine tells its backlog."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.clock import ManualClock
from baton.engine.runner import Part
from tests.unit.engine.core_driver import Driver, prompt, request

ROW_SECONDS, TOKEN_SECONDS = 0.005, 0.0001
TARGET_SECONDS = 0.020


class Machine:
    """Lets time pass as a machine would need it for each step, and keeps the steps."""

    def __init__(self) -> None:
        self.clock: ManualClock | None = None
        self.steps: list[tuple[int, int]] = []  # rows, tokens of chunks

    def __call__(self, parts: Sequence[Part]) -> None:
        sizes = [part.end - part.start for part in parts]
        rows, tokens = sizes.count(1), sum(size for size in sizes if size > 1)
        self.steps.append((rows, tokens))
        assert self.clock is not None
        self.clock.advance(ROW_SECONDS * (rows > 0) + TOKEN_SECONDS * tokens)


def driver(machine: Machine, target_ms: int) -> Driver:
    made = Driver(512, max_step_tokens=512, on_step=machine, tpot_target_ms=target_ms)
    machine.clock = made.clock
    return made


def measured(target_ms: int) -> list[float]:
    """Seconds of the steps in which one request decodes and a long prompt is computed beside it."""
    machine = Machine()
    engine = driver(machine, target_ms)
    answering = engine.reserve(request(prompt(40, 1), 200))
    engine.decode_when_admitted(answering)
    for _ in range(20):
        engine.step()
    for salt in range(2, 6):
        engine.decode_when_admitted(engine.reserve(request(prompt(700, salt), 2)))
    machine.steps.clear()
    engine.finish(answering)
    return [ROW_SECONDS + TOKEN_SECONDS * tokens for rows, tokens in machine.steps if rows and tokens]


def test_chunks_beside_answers_keep_the_target() -> None:
    seconds = measured(20)
    assert len(seconds) > 8
    assert max(seconds[8:]) <= 1.1 * TARGET_SECONDS
    assert max(seconds[8:]) >= 0.8 * TARGET_SECONDS


def test_without_a_target_chunks_are_as_large_as_a_step() -> None:
    assert max(measured(0)) > 2 * TARGET_SECONDS


def test_an_engine_tells_what_it_has_to_compute_and_how_fast() -> None:
    machine = Machine()
    engine = driver(machine, 0)
    first = engine.prefill(request(prompt(600, 1)))
    engine.core.admit()
    assert engine.stats.backlog_tokens == 600
    engine.step()
    assert engine.stats.backlog_tokens == 600 - 512
    engine.step()
    assert engine.outcomes[first].first is not None
    assert engine.stats.backlog_tokens == 0
    assert round(engine.stats.prompt_tokens_per_second * TOKEN_SECONDS, 6) == 1
    engine.release(first)
    engine.step()
    engine.assert_idle()
