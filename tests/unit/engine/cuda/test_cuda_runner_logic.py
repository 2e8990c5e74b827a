"""What the GPU's runner does beside its kernels, with kernels in plain torch: it answers as the reference does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core.types import TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.cuda.runner import CudaRunner
from tests.real_engines import UNLIKE, VOCABULARY, alone, prompt, request, together, varied
from tests.unit.engine.core_driver import CoreDriver
from tests.unit.engine.cuda.cpu_doubles import cpu_runner, no_device
from tests.unit.engine.oracles import Oracle

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


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral-window", "qwen3-moe"])
def test_requests_with_windows_and_without_answer_as_each_does_alone(name: str, speculation: str) -> None:
    """The model's own window of 48 tokens is narrower than some of theirs."""
    wanted = [replace(varied(index, 20), attention_window=(None, 16, 1, 60, 33)[index % 5]) for index in range(10)]
    expected = [alone(name, each).token_ids for each in wanted]
    assert expected != [alone(name, replace(each, attention_window=None)).token_ids for each in wanted]
    config = EngineConfig(max_running=6, max_step_tokens=40, block_size=16, speculation=speculation)
    known = [[*each.prompt, *tokens] for each, tokens in zip(wanted, expected, strict=True)]
    drafter = Oracle(known, VOCABULARY, 3) if speculation != "off" else None
    driver = CoreDriver(cpu_runner(name, rows=32, tokens=40, blocks=96), config, drafter)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert [tuple(driver.outcomes[key].tokens) for key in keys] == expected
    assert (driver.stats.draft_tokens_accepted > 0) == (drafter is not None)


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


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("mistaken", [0, 3])
def test_rows_of_drafts_draw_what_the_reference_answers_alone(name: str, mistaken: int) -> None:
    """Some with drafts and some without, beside prompts in chunks, with logits of every draft's row."""
    wanted = [replace(varied(index, 14), logprobs=2 if index % 3 == 0 else None) for index in range(9)]
    expected = [alone(name, each) for each in wanted]
    known = [[*each.prompt, *answer.token_ids] for each, answer in zip(wanted, expected, strict=True)]
    config = EngineConfig(max_running=6, max_step_tokens=40, block_size=16, speculation="ngram", draft_tokens=5)
    runner = cpu_runner(name, rows=32, tokens=40, blocks=96)
    driver = CoreDriver(runner, config, Oracle(known, VOCABULARY, mistaken))
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    found = [together(driver.outcomes[key].chunks) for key in keys]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [each.token_id for each in ours.logprobs] == [each.token_id for each in theirs.logprobs]
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        assert all(each.logprob == pytest.approx(other.logprob, abs=1e-4) for each, other in pairs)
    assert driver.stats.draft_tokens_accepted > 10
    assert bool((runner._machinery.pool[-1] == 0).all()), "padding wrote to its block"


@pytest.mark.parametrize("mistaken", [0, 3])
def test_a_lone_request_speculates_to_the_same_end(mistaken: int) -> None:
    name = "llama-gqa-tied"
    wanted = request(prompt(20), 60)
    expected = alone(name, wanted).token_ids
    config = EngineConfig(block_size=16, speculation="ngram")
    oracle = Oracle([[*wanted.prompt, *expected]], VOCABULARY, mistaken)
    driver = CoreDriver(cpu_runner(name, rows=32, tokens=64, blocks=32), config, oracle)
    assert tuple(driver.answer(wanted).tokens) == expected
    assert driver.stats.steps < 40


@pytest.mark.parametrize("mistaken", [0, 3])
def test_sequences_that_lose_their_blocks_speculate_on_in_others(mistaken: int) -> None:
    name = "llama-gqa-tied"
    wanted = [varied(index, 24, prompt=prompt(20 + index, index)) for index in range(6)]
    expected = [alone(name, each).token_ids for each in wanted]
    known = [[*each.prompt, *tokens] for each, tokens in zip(wanted, expected, strict=True)]
    runner = cpu_runner(name, rows=32, tokens=32, blocks=11)
    config = EngineConfig(max_running=6, max_step_tokens=32, block_size=16, growth_window=0, speculation="ngram")
    driver = CoreDriver(runner, config, Oracle(known, VOCABULARY, mistaken))
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert driver.stats.preemptions > 0
    assert driver.stats.draft_tokens_accepted > 0
    assert [tuple(driver.outcomes[key].tokens) for key in keys] == expected


def test_logits_that_are_not_finite_after_a_draft_fail_the_request_when_it_comes_there() -> None:
    """The draft is right, and the model cannot go on from it: what was drawn before still counts."""
    name, config = "llama-gqa-untied", EngineConfig(block_size=16, speculation="ngram", max_running=4)
    wanted = request((1, 2, 3, 4), 12)
    tokens = alone(name, wanted).token_ids
    bad = next(
        index for index, token in enumerate(tokens) if index > 3 and token not in (*wanted.prompt, *tokens[:index])
    )
    runner = cpu_runner(name, rows=32, tokens=64, blocks=32)
    runner._machinery.decoder._embedding[tokens[bad]] = torch.nan
    driver = CoreDriver(runner, config, Oracle([[*wanted.prompt, *tokens]], VOCABULARY, 0))
    key = driver.reserve(wanted)
    driver.decode_when_admitted(key)
    error = driver.finish(key).error
    assert tuple(driver.outcomes[key].tokens) == tokens[: bad + 1]
    assert error is not None
    assert f"not finite at position {4 + bad + 1}" in error.message


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


def test_a_steps_end_is_noted_before_what_its_collection_waits_for() -> None:
    """Or the device might not have come to the end when its time is read."""
    runner = cpu_runner("llama-gqa-tied", rows=2, tokens=16, blocks=8)
    order: list[str] = []
    timer, slot = runner._timer, runner._slots[0]
    end, queue = timer.end, slot.queue
    timer.end = lambda: (order.append("end"), end())[1]  # type: ignore[method-assign]
    slot.queue = lambda: (order.append("waited for"), queue())[1]  # type: ignore[method-assign]
    driver = CoreDriver(runner, EngineConfig(max_running=2, max_step_tokens=16, block_size=16))
    driver.answer(request(prompt(9), 1))
    assert order[:2] == ["end", "waited for"]
