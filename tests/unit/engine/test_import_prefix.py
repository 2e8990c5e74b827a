"""A request that starts from blocks which were computed elsewhere: exact, counted as cached, and only when held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import TransferRejected
from baton.core.types import FilledBlocks, Sampling, TokenRequest, Usage
from baton.engine.sequence import Sequence, Work
from services.kvtransfer.fetcher import prompt_names
from tests.unit.engine.core_driver import Driver, prompt, request

SAMPLED = Sampling(temperature=0.7, seed=11, repetition_penalty=1.1)
LENGTH = 23  # five full blocks of 4 tokens, and 3 tokens


@pytest.fixture(params=[0, 1], ids=["in step", "one step ahead"], autouse=True)
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Driver, "steps_ahead", request.param)
    return request.param


def names(wanted: TokenRequest, driver: Driver) -> list[bytes]:
    return prompt_names(wanted, driver.runner.card)


def computed_elsewhere(wanted: TokenRequest) -> bytes:
    """The bytes of all full blocks of the prompt, as another engine has them in its prefix cache."""
    source = Driver()
    source.answer(wanted)
    payload = source.read_cached(*names(wanted, source))
    assert isinstance(payload, bytes)
    return payload


def wanted(**fields: Any) -> TokenRequest:
    return request(prompt(LENGTH), sampling=SAMPLED, **fields)


@pytest.mark.parametrize("blocks", range(1, 6))
@pytest.mark.parametrize("cached", [0, 1, 3])
def test_an_answer_from_an_imported_prefix_is_that_of_one_engine(blocks: int, cached: int) -> None:
    asked = wanted()
    expected, payload = Driver().answer(asked).tokens, computed_elsewhere(asked)
    driver = Driver()
    size = driver.runner.card.format.block_bytes
    if cached:
        driver.answer(request(asked.prompt[: 4 * cached], 1))
    before = driver.stats
    key = driver.reserve(asked)
    driver.step()
    imports = blocks > cached
    if imports:
        assert driver.write(key, cached, payload[cached * size : blocks * size]) is None
        assert driver.import_blocks(key, blocks) is None
    driver.decode(key)
    outcome = driver.finish(key)
    skipped = 4 * max(blocks, cached)
    assert outcome.tokens == expected
    assert outcome.chunks[0].usage == Usage(LENGTH, skipped, 1)
    assert driver.stats.prompt_tokens_computed - before.prompt_tokens_computed == LENGTH - skipped
    assert driver.stats.prompt_tokens_cached - before.prompt_tokens_cached == skipped
    driver.assert_idle()
    assert driver.answer(asked).cached_tokens == 20  # what was imported is in the prefix cache


def test_a_prefill_from_an_imported_prefix_announces_and_reads_like_any_other() -> None:
    asked = wanted()
    payload = computed_elsewhere(asked)
    plain, driver = Driver(), Driver()
    there = plain.prefill(asked)
    expected = plain.first_token(there)
    key = driver.prefill(asked, 0)
    driver.step()
    size = driver.runner.card.format.block_bytes
    assert driver.write(key, 0, payload[: 3 * size]) is None
    assert driver.import_blocks(key, 3) is None
    assert driver.outcomes[key].filled == [FilledBlocks(0, 3, 12)]
    driver.decode(key)
    first = driver.first_token(key)
    assert first == replace(expected, usage=Usage(LENGTH, 12, 1))
    assert [driver.read(key, i, 1) for i in range(6)] == [plain.read(there, i, 1) for i in range(6)]
    assert sum(blocks.block_count for blocks in driver.outcomes[key].filled) == 6
    driver.release(key)
    driver.assert_idle()


def test_wrong_bytes_that_were_called_valid_fail_their_request_and_are_not_found_again() -> None:
    asked = wanted()
    driver = Driver()
    size = driver.runner.card.format.block_bytes
    key = driver.reserve(asked)
    driver.step()
    driver.write(key, 0, bytes(2 * size))
    driver.import_blocks(key, 2)
    driver.decode(key)
    assert driver.finish(key).error is not None
    assert driver.answer(asked).cached_tokens == 0
    driver.assert_idle()


@pytest.mark.parametrize("count", [0, 6, 7])
def test_an_import_of_nothing_or_of_everything_is_refused(count: int) -> None:
    driver = Driver()
    key = driver.reserve(wanted())
    driver.step()
    assert isinstance(driver.import_blocks(key, count), TransferRejected)
    driver.release(key)
    driver.assert_idle()


def test_an_import_into_a_request_that_has_started_is_refused() -> None:
    driver = Driver()
    key = driver.reserve(wanted())
    driver.step()
    driver.decode(key)
    driver.step()
    assert isinstance(driver.import_blocks(key, 2), TransferRejected)
    driver.finish(key)
    assert isinstance(driver.import_blocks(key, 2), TransferRejected)
    driver.assert_idle()


def test_prompt_logprobs_need_every_row_so_that_nothing_is_imported() -> None:
    driver = Driver()
    key = driver.reserve(wanted(prompt_logprobs=1))
    driver.step()
    assert isinstance(driver.import_blocks(key, 1), TransferRejected)
    driver.release(key)
    driver.assert_idle()


def test_a_request_preempted_after_its_import_answers_as_if_alone() -> None:
    asked = [request(prompt(14, i), 20, sampling=SAMPLED) for i in range(3)]
    driver = Driver(14, growth_window=0)
    size = driver.runner.card.format.block_bytes
    keys = [driver.reserve(one) for one in asked]
    driver.step()
    for key, one in zip(keys, asked, strict=True):
        driver.write(key, 0, computed_elsewhere(one)[: 2 * size])
        assert driver.import_blocks(key, 2) is None
        driver.decode(key)
    driver.finish(*keys)
    assert driver.stats.preemptions > 0
    assert [driver.outcomes[key].tokens for key in keys] == [Driver().answer(one).tokens for one in asked]
    driver.assert_idle()


def test_reading_cached_blocks_stops_at_the_first_that_is_gone() -> None:
    asked = wanted()
    driver = Driver()
    driver.answer(asked)
    known = names(asked, driver)
    size = driver.runner.card.format.block_bytes
    whole = driver.read_cached(*known)
    assert isinstance(whole, bytes) and len(whole) == 5 * size
    assert driver.read_cached(known[1], bytes(16), known[2]) == whole[size : 2 * size]
    assert driver.read_cached(bytes(16), known[0]) == b""


@pytest.mark.parametrize("window", [None, 8])
def test_a_front_names_blocks_as_its_engine_does(window: int | None) -> None:
    card = Driver().runner.card
    asked = replace(wanted(salt=b"tenant"), generated=(7, 8, 9), attention_window=window)
    named = prompt_names(asked, card)
    assert named == Sequence(1, Work.DECODE, asked, card, deadline=None)._hashes_to(6)
    assert named[0] != prompt_names(replace(asked, salt=b"other"), card)[0]
