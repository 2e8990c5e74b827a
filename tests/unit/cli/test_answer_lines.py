from __future__ import annotations

from baton.cli.answers import Answer
from baton.core.errors import BatonError, InvalidRequest, Overloaded
from baton.core.types import FinishReason, GenerateChunk, Placement, PrefillMode, TokenLogprob, Usage

PLACED = Placement(prefill_worker="p", decode_worker="d", prefill_mode=PrefillMode.REMOTE, kv_bytes=64)


def test_a_line_has_the_fields_that_scripts_rely_on() -> None:
    answer = Answer("case", started=10.0)
    answer.add(GenerateChunk("r", token_ids=(5,), text="a", logprobs=(TokenLogprob(5, -0.5, ((5, -0.5),)),)), 10.25)
    last = GenerateChunk(
        "r",
        token_ids=(6, 7),
        text="bc",
        finish=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3),
        placement=PLACED,
        migrations=1,
    )
    answer.add(last, 10.75)
    line = answer.as_json()
    assert {name: line[name] for name in line if name not in ("index", "kv_bytes")} == {
        "id": "case",
        "request_id": "r",
        "token_ids": [5, 6, 7],
        "text": "abc",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": 3},
        "logprobs": [{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]}],
        "prefill": {"worker": "p", "mode": "remote"},
        "decode": {"worker": "d"},
        "migrations": 1,
        "ttft_ms": 250.0,
        "tpot_ms": 250.0,
        "error": None,
    }


def test_a_line_names_the_services_limit_where_one_ended_the_answer() -> None:
    answer = Answer("case")
    answer.add(GenerateChunk("r", token_ids=(5,)), 0.0)
    assert "limit" not in answer.as_json()
    answer.add(GenerateChunk("r", finish=FinishReason.LENGTH, limit="max_tokens"), 0.0)
    assert answer.as_json()["limit"] == "max_tokens"


def test_an_answer_without_tokens_has_no_times() -> None:
    line = Answer("case", error=InvalidRequest("n: must be ...", field="n")).as_json()
    assert (line["ttft_ms"], line["tpot_ms"], line["finish_reason"]) == (None, None, None)


def test_an_error_has_status_code_reason_and_message() -> None:
    def error(raised: BatonError) -> object:
        return Answer("case", error=raised).as_json()["error"]

    assert error(Overloaded("full")) == {"code": "UNAVAILABLE", "reason": "OVERLOADED", "message": "full"}
    assert error(InvalidRequest("x")) == {"code": "INVALID_ARGUMENT", "reason": "INVALID_REQUEST", "message": "x"}


def test_the_log_probabilities_of_a_prompt_keep_their_gap() -> None:
    answer = Answer("case")
    answer.add(GenerateChunk("r", prompt_logprobs=(None, TokenLogprob(3, -1.0, ()))), 0.0)
    assert answer.as_json()["prompt_logprobs"] == [None, {"token_id": 3, "logprob": -1.0, "top": []}]
