from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.core.types import ChatMessage, GenerateRequest, Sampling, StopRules
from gateway.validate import Limits, check_request, check_token_ids, fit_max_tokens
from tests.unit.gateway.doubles import CARD, CONTEXT, VOCAB

LIMITS = Limits(prompt_bytes=100)
GOOD = GenerateRequest(text="hello")

BAD: list[tuple[str, GenerateRequest]] = [
    ("text", GenerateRequest(text="")),
    ("prompt_token_ids", GenerateRequest(prompt_token_ids=())),
    ("messages", GenerateRequest(messages=())),
    ("prompt", GenerateRequest()),
    ("prompt", GenerateRequest(text="x", prompt_token_ids=(1,))),
    ("prompt", GenerateRequest(text="x", messages=(ChatMessage("user", "x"),))),
    ("text", GenerateRequest(text="x" * 101)),
    ("text", GenerateRequest(text="é" * 51)),
    ("prompt_token_ids", GenerateRequest(prompt_token_ids=(1,) * 26)),
    ("messages[1].content", GenerateRequest(messages=(ChatMessage("user", "x" * 60), ChatMessage("user", "y" * 60)))),
    ("messages[1].role", GenerateRequest(messages=(ChatMessage("user", "x"), ChatMessage("robot", "y")))),
    ("messages[0].role", GenerateRequest(messages=(ChatMessage("", "x"),))),
    ("max_tokens", replace(GOOD, max_tokens=0)),
    ("max_tokens", replace(GOOD, max_tokens=-5)),
    ("min_tokens", replace(GOOD, stop=StopRules(min_tokens=-1))),
    ("min_tokens", replace(GOOD, max_tokens=3, stop=StopRules(min_tokens=4))),
    ("n", replace(GOOD, n=0)),
    ("n", replace(GOOD, n=17)),
    ("temperature", replace(GOOD, sampling=Sampling(temperature=-0.1))),
    ("temperature", replace(GOOD, sampling=Sampling(temperature=2.1))),
    ("temperature", replace(GOOD, sampling=Sampling(temperature=float("nan")))),
    ("temperature", replace(GOOD, sampling=Sampling(temperature=float("inf")))),
    ("top_p", replace(GOOD, sampling=Sampling(top_p=0.0))),
    ("top_p", replace(GOOD, sampling=Sampling(top_p=1.5))),
    ("top_k", replace(GOOD, sampling=Sampling(top_k=-1))),
    ("min_p", replace(GOOD, sampling=Sampling(min_p=1.1))),
    ("repetition_penalty", replace(GOOD, sampling=Sampling(repetition_penalty=0.0))),
    ("presence_penalty", replace(GOOD, sampling=Sampling(presence_penalty=2.5))),
    ("frequency_penalty", replace(GOOD, sampling=Sampling(frequency_penalty=-2.5))),
    ("logit_bias[3]", replace(GOOD, sampling=Sampling(logit_bias=((3, 101.0),)))),
    ("logit_bias", replace(GOOD, sampling=Sampling(logit_bias=((3, 1.0),) * 1025))),
    ("seed", replace(GOOD, seed=-1)),
    ("seed", replace(GOOD, seed=2**64)),
    ("logprobs", replace(GOOD, logprobs=21)),
    ("logprobs", replace(GOOD, logprobs=-1)),
    ("prompt_logprobs", replace(GOOD, prompt_logprobs=21)),
    ("stop_token_ids", replace(GOOD, stop=StopRules(stop_token_ids=(1,) * 257))),
    ("stop_strings[1]", replace(GOOD, stop_strings=("a", ""))),
    ("stop_strings", replace(GOOD, stop_strings=("a",) * 65)),
    ("stop_strings[0]", replace(GOOD, stop_strings=("a" * 1025,))),
    ("request_id", replace(GOOD, request_id="x" * 129)),
    ("request_id", replace(GOOD, request_id="a b")),
    ("resume", replace(GOOD, request_id="r", resume=((1,), (2,)))),
    ("request_id", replace(GOOD, resume=((1,),))),
    ("timeout", replace(GOOD, timeout=0.0)),
    ("timeout", replace(GOOD, timeout=float("nan"))),
]


@pytest.mark.parametrize(("field", "request_"), BAD, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD)])
def test_names_the_field_that_is_out_of_bounds(field: str, request_: GenerateRequest) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request_, LIMITS)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}:")
    assert "got" in caught.value.message


@pytest.mark.parametrize(
    "request_",
    [
        GOOD,
        replace(
            GOOD, sampling=Sampling(temperature=2, top_p=1, min_p=1, presence_penalty=-2, logit_bias=((0, -100.0),))
        ),
        replace(GOOD, seed=2**64 - 1, n=16, logprobs=20, prompt_logprobs=0, max_tokens=1, stop_strings=("a" * 1024,)),
        replace(GOOD, request_id="r" * 128, resume=((1, 2),), stop=StopRules(min_tokens=2)),
        GenerateRequest(messages=(ChatMessage("system", ""), ChatMessage("user", "x" * 100))),
        GenerateRequest(prompt_token_ids=(1,) * 25),
    ],
)
def test_accepts_what_is_at_the_bounds(request_: GenerateRequest) -> None:
    check_request(request_, LIMITS)


def test_an_error_does_not_repeat_a_huge_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(GenerateRequest(messages=(ChatMessage("r" * 10_000, "x"),)), Limits())
    assert len(caught.value.message) < 300


@given(tokens=st.integers(1, CONTEXT - 1), default=st.integers(1, 2 * CONTEXT))
def test_an_absent_max_tokens_is_the_default_but_at_most_what_fits(tokens: int, default: int) -> None:
    assert fit_max_tokens(GOOD, tokens, CARD, Limits(default_max_tokens=default)) == min(default, CONTEXT - tokens)


def test_prompt_and_max_tokens_must_fit_the_context_together() -> None:
    assert fit_max_tokens(replace(GOOD, max_tokens=12), CONTEXT - 12, CARD, LIMITS) == 12
    with pytest.raises(InvalidRequest, match=f"context of {CONTEXT} tokens, got 500 [+] 13") as caught:
        fit_max_tokens(replace(GOOD, max_tokens=13), 500, CARD, LIMITS)
    assert caught.value.field == "max_tokens"


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    with pytest.raises(InvalidRequest, match=f"{CONTEXT} tokens") as caught:
        fit_max_tokens(GOOD, CONTEXT, CARD, LIMITS)
    assert caught.value.field == "prompt"


def test_min_tokens_raises_an_absent_max_tokens() -> None:
    request = replace(GOOD, stop=StopRules(min_tokens=200))
    assert fit_max_tokens(request, 10, CARD, Limits(default_max_tokens=100)) == 200
    with pytest.raises(InvalidRequest) as caught:
        fit_max_tokens(replace(GOOD, stop=StopRules(min_tokens=CONTEXT)), 10, CARD, LIMITS)
    assert caught.value.field == "min_tokens"


def test_a_resume_longer_than_max_tokens_is_refused() -> None:
    request = replace(GOOD, request_id="r", n=2, max_tokens=3, resume=((1, 2, 3), (1, 2, 3, 4)))
    with pytest.raises(InvalidRequest) as caught:
        fit_max_tokens(request, 10, CARD, LIMITS)
    assert caught.value.field == "resume[1]"


@pytest.mark.parametrize(
    ("field", "request_", "prompt"),
    [
        ("prompt_token_ids[1]", GOOD, (0, VOCAB)),
        ("prompt_token_ids[0]", GOOD, (-1,)),
        ("prompt", GOOD, ()),
        ("stop_token_ids[0]", replace(GOOD, stop=StopRules(stop_token_ids=(VOCAB,))), (1,)),
        ("logit_bias[0]", replace(GOOD, sampling=Sampling(logit_bias=((VOCAB, 1.0),))), (1,)),
        ("resume[0][2]", replace(GOOD, resume=((1, 2, VOCAB),)), (1,)),
    ],
)
def test_names_the_token_id_that_is_not_the_models(
    field: str, request_: GenerateRequest, prompt: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_token_ids(request_, prompt, CARD)
    assert caught.value.field == field
