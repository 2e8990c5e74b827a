from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.types import (
    FinishReason,
    FirstToken,
    Sampling,
    StopRules,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from baton.engine.fake import fake_card
from bench.load_mix import Computed, Departure, LoadMix
from bench.load_record import LoadRecord

CARD = fake_card()
REQUEST = TokenRequest("r", (5, 6, 7), stop=StopRules(4, min_tokens=1, stop_token_ids=(9,), ignore_eos=True))


def record(token_ids: tuple[int, ...], finish: FinishReason, counted: int, asked: TokenRequest = REQUEST) -> LoadRecord:
    made = LoadRecord(asked)
    made.add(TokenChunk(token_ids, finish=finish, usage=Usage(3, 0, counted)))
    return made


def test_an_answer_that_agrees_with_its_request_has_no_fault() -> None:
    assert record((3, 4, 5, 6), FinishReason.LENGTH, 4).faults(CARD) == []
    assert record((3, 9), FinishReason.STOP, 2).faults(CARD) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (record((3, 4, 5), FinishReason.LENGTH, 3), "finish is length after 3 of 4 tokens"),
        (record((3, 4, 5, 6), FinishReason.LENGTH, 5), "the engine counted 5 tokens, 4 came"),
        (record((3, 9, 5, 6), FinishReason.LENGTH, 4), "token 1 of 4 is a stop id"),
        (record((9,), FinishReason.STOP, 1), "token 0 is a stop id, min_tokens is 1"),
        (record((3, 4), FinishReason.STOP, 2), "finish is stop and the missing stop id is None"),
        (record((3, 4, 5, CARD.vocab_size), FinishReason.LENGTH, 4), "not in the vocabulary"),
        (record((3, 4, 5, 6, 7), FinishReason.LENGTH, 5), "5 tokens came, from 1 to 4 were asked for"),
        (record((3, 4, 5, 6), FinishReason.LENGTH, 4, replace(REQUEST, logprobs=0)), "not of the tokens that came"),
        (record((3, 4, 5, 6), FinishReason.LENGTH, 4, replace(REQUEST, prompt_logprobs=1)), "expected 3"),
    ],
)
def test_an_answer_that_does_not_is_told(wrong: LoadRecord, said: str) -> None:
    assert any(said in fault and fault.startswith("r: ") for fault in wrong.faults(CARD))


def test_a_chunk_after_the_last_one_and_a_missing_usage_are_told() -> None:
    late = record((3, 4, 5, 6), FinishReason.LENGTH, 4)
    late.add(TokenChunk())
    assert "r: 1 chunks came after the last one" in late.faults(CARD)
    unused = LoadRecord(REQUEST)
    unused.add(TokenChunk((3, 4, 5, 6), finish=FinishReason.LENGTH))
    assert unused.faults(CARD) == ["r: the last chunk has no usage"]


def test_the_first_token_of_a_prompt_computed_apart_counts() -> None:
    made = LoadRecord(replace(REQUEST, logprobs=0))
    made.add_first(FirstToken(3, Usage(3, 0, 1), TokenLogprob(3, -1.0)))
    made.add(TokenChunk((9,), (TokenLogprob(9, -1.0),), finish=FinishReason.STOP, usage=Usage(3, 0, 2)))
    assert made.faults(CARD) == []


def test_the_mix_is_the_same_for_a_seed_and_fits_the_longest() -> None:
    one, same, other = (LoadMix(CARD, 200, seed, 0.01) for seed in (1, 1, 2))
    errands = [one.errand() for _ in range(400)]
    assert errands == [same.errand() for _ in range(400)]
    assert errands != [other.errand() for _ in range(400)]
    for errand in errands:
        request = errand.request
        assert len(request.prompt) >= 1
        assert len(request.prompt) + request.stop.max_tokens <= 200
        assert request.stop.min_tokens <= request.stop.max_tokens


def test_the_mix_has_everything_that_a_load_is_to_be_made_of() -> None:
    mix = LoadMix(CARD, 200, 4, 0.01)
    errands = [mix.errand() for _ in range(600)]
    departures = [errand.departure for errand in errands if errand.departure is not None]
    assert {errand.computed for errand in errands} == set(Computed)
    assert {errand.request.priority for errand in errands} == {0, 1, 2}
    assert any(errand.request.sampling == Sampling() for errand in errands)
    assert any(errand.request.sampling.temperature and errand.request.sampling.logit_bias for errand in errands)
    assert any(errand.request.timeout is not None for errand in errands)
    assert Departure(seconds=0.0) in departures
    assert any(departure.seconds for departure in departures)
    assert {departure.resumes for departure in departures if departure.tokens is not None} == {False, True}
    heads = [errand.request.prompt[:8] for errand in errands if len(errand.request.prompt) >= 8]
    assert len(set(heads)) < 0.8 * len(heads)
