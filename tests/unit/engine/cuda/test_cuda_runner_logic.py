"""What the GPU's runner does beside its kernels, with kernels in plain torch: it answers as the reference does."""

from __future__ import annotations

import pytest
import torch

from baton.core.types import TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.cuda.runner import CudaRunner
from tests.real_engines import UNLIKE, alone, prompt, request, together, varied
from tests.unit.engine.core_driver import CoreDriver
from tests.unit.engine.cuda.cpu_doubles import cpu_runner, no_device

__all__ = ["no_device"]

pytestmark = pytest.mark.usefixtures("no_device")


def answers(runner: CudaRunner, config: EngineConfig, wanted: list[TokenRequest]) -> list[tuple[int, ...]]:
    """All requests at once, over the engine's own core, which runs one step ahead."""
    driver = CoreDriver(runner, config)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    return [tuple(driver.outcomes[key].tokens) for key in keys]


@pytest.mark.parametrize("name", UNLIKE)
def test_mixed_batches_answer_what_the_reference_answers_alone(name: str) -> None:
    """Prompts in chunks beside decoding rows, every way of drawing, early ends: with few rows and with many."""
    wanted = [varied(index, 12) for index in range(9)]
    runner = cpu_runner(name, rows=6, tokens=40, blocks=96)
    found = answers(runner, EngineConfig(max_running=6, max_step_tokens=40, block_size=16), wanted)
    assert found == [alone(name, each).token_ids for each in wanted]
    assert bool((runner._machinery.pool[-1] == 0).all()), "padding wrote to its block"


def test_sequences_that_lose_their_blocks_are_recomputed_to_the_same_tokens() -> None:
    name = "llama-gqa-tied"
    wanted = [varied(index, 24, prompt=prompt(20 + index, index)) for index in range(6)]
    runner = cpu_runner(name, rows=6, tokens=32, blocks=11)
    config = EngineConfig(max_running=6, max_step_tokens=32, block_size=16, growth_window=0)
    driver = CoreDriver(runner, config)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert driver.stats.preemptions > 0
    assert [tuple(driver.outcomes[key].tokens) for key in keys] == [alone(name, each).token_ids for each in wanted]


def test_log_probabilities_are_those_of_the_reference() -> None:
    name = "llama-gqa-untied"
    wanted = request(prompt(37), 6, logprobs=3, prompt_logprobs=2)
    runner = cpu_runner(name, rows=4, tokens=16, blocks=32)
    driver = CoreDriver(runner, EngineConfig(max_running=4, max_step_tokens=16, block_size=16))
    beside = driver.reserve(request(prompt(9, 1), 12))
    driver.decode_when_admitted(beside)
    key = driver.reserve(wanted)
    driver.decode_when_admitted(key)
    driver.finish(key, beside)
    found, reference = together(driver.outcomes[key].chunks), alone(name, wanted)
    assert found.token_ids == reference.token_ids
    for ours, theirs in zip(
        [*found.logprobs, *found.prompt_logprobs[1:]],
        [*reference.logprobs, *reference.prompt_logprobs[1:]],
        strict=True,
    ):
        assert ours is not None
        assert theirs is not None
        assert (ours.token_id, ours.logprob) == (theirs.token_id, pytest.approx(theirs.logprob, abs=1e-4))
        assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-4)


def test_logits_that_are_not_finite_fail_their_own_request_alone() -> None:
    name, bad = "llama-gqa-untied", 200
    runner = cpu_runner(name, rows=4, tokens=64, blocks=32)
    runner._machinery.decoder._embedding[bad] = torch.nan
    driver = CoreDriver(runner, EngineConfig(max_running=4, max_step_tokens=64, block_size=16))
    healthy, broken = request((1, 2, 3, 4), 8), request((5, bad, 6), 8)
    keys = [driver.reserve(each) for each in (healthy, broken)]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert tuple(driver.outcomes[keys[0]].tokens) == alone(name, healthy).token_ids
    error = driver.outcomes[keys[1]].error
    assert error is not None
    assert "not finite at position 3" in error.message
