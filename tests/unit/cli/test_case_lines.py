from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.cases import Case, read_cases
from baton.core.errors import ConfigError, InvalidRequest
from baton.core.types import ChatMessage, GenerateRequest, Sampling, StopRules

DEFAULTS = GenerateRequest(model="m", sampling=Sampling(temperature=0.5), max_tokens=7)


def read(tmp_path: Path, *lines: str) -> list[Case]:
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return list(read_cases(path, DEFAULTS))


def line(**fields: object) -> str:
    return json.dumps({"id": "a", "prompt_token_ids": [1], **fields})


def test_every_field_reaches_the_request(tmp_path: Path) -> None:
    sampling = {"temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    sampling |= {"presence_penalty": 0.2, "frequency_penalty": 0.3}
    rules = {"min_tokens": 2, "stop_token_ids": [7, 8], "ignore_eos": True}
    direct = {"max_tokens": 9, "seed": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 0, "model": "other"}
    direct |= {"request_id": "r", "timeout": 5}
    [case] = read(tmp_path, line(logit_bias={"4": -1.5}, stop=["x", "y"], **sampling, **rules, **direct))
    assert case.request == GenerateRequest(
        prompt_token_ids=(1,),
        sampling=Sampling(**sampling, logit_bias=((4, -1.5),)),  # type: ignore[arg-type]
        stop=StopRules(min_tokens=2, stop_token_ids=(7, 8), ignore_eos=True),
        stop_strings=("x", "y"),
        **direct,  # type: ignore[arg-type]
    )


def test_what_a_case_leaves_out_comes_from_the_defaults(tmp_path: Path) -> None:
    text, chat = read(
        tmp_path,
        json.dumps({"id": "t", "text": "so", "stop": "x"}),
        "",
        json.dumps({"id": "c", "messages": [{"role": "user", "content": "hi"}]}),
    )
    assert (text.request.text, text.request.stop_strings) == ("so", ("x",))
    assert chat.request.messages == (ChatMessage("user", "hi"),)
    for case in (text, chat):
        assert (case.request.model, case.request.max_tokens, case.request.sampling) == ("m", 7, DEFAULTS.sampling)


@pytest.mark.parametrize(
    ("bad", "field", "said"),
    [
        (line(colour=1), "colour", "unknown field; known are "),
        (line(temperature="hot"), "temperature", "must be a number, got 'hot'"),
        (line(top_k=1.5), "top_k", "must be an integer, got 1.5"),
        (line(max_tokens=True), "max_tokens", "must be an integer, got True"),
        (line(ignore_eos=1), "ignore_eos", "must be true or false, got 1"),
        (line(stop=[1]), "stop[0]", "must be a string, got 1"),
        (line(stop_token_ids=3), "stop_token_ids", "must be a list, got 3"),
        (line(logit_bias={"x": 1}), "logit_bias", "must be keyed by token ids, got 'x'"),
        (line(logit_bias={"1": "y"}), "logit_bias[1]", "must be a number, got 'y'"),
        (line(prompt_token_ids=[1, "2"]), "prompt_token_ids[1]", "must be an integer, got '2'"),
        (line(text="both"), "prompt", "must be exactly one of prompt_token_ids, text, messages, got prompt_token_ids"),
        (json.dumps({"id": "a"}), "prompt", "got none"),
        (json.dumps({"id": 4, "text": "x"}), "id", "must be a string, got 4"),
        (json.dumps({"id": "a", "messages": [{"role": "user"}]}), "messages[0]", "exactly role and content"),
        (json.dumps({"id": "a", "messages": [{"role": "user", "content": 1}]}), "messages[0].content", "a string"),
        ('{"id": "a", "text": "x", "text": "y"}', "text", "appears twice"),
        ('{"id": "\\ud800", "text": "x"}', "id", "surrogates not allowed"),
        ('{"id": "a", "text": "\\udfff"}', "text", "surrogates not allowed"),
        (line(temperature=10**400), "temperature", "int too large"),
        ("[1]", "", "must be a JSON object, got list"),
        ("{", "line", "not JSON"),
        ("[" * 100_000, "line", "not JSON"),
        (line(seed=0).replace("0", "9" * 5000), "line", "not JSON"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, bad: str, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path, json.dumps({"id": "good", "text": "x"}), bad)
    assert caught.value.field == field
    assert caught.value.message.startswith("cases.jsonl line 2: ")
    assert said in caught.value.message
    assert len(caught.value.message) < 600


def test_an_id_must_be_unique_for_a_run_resumes_by_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="line 2: id: must be unique in the file, got 'a' again"):
        read(tmp_path, line(), line())


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(read_cases(tmp_path / "none.jsonl", DEFAULTS))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        list(read_cases(binary, DEFAULTS))
