"""The default model's own tokenizer and template against what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.clock import ManualClock
from baton.text.chat_template import load_chat_template, parse_messages
from baton.text.detokenize import IncrementalDetokenizer
from baton.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[2] / "data"


def lines(name: str) -> list[Any]:
    cases = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    assert cases
    return cases


@pytest.fixture(scope="module")
def smollm2(smollm2_directory: Path) -> Tokenizer:
    return load_tokenizer(smollm2_directory)


def check_prompts_and_outputs(name: str, directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    template = load_chat_template(directory, ManualClock())
    for case in lines(name):
        text = case["text"] if "text" in case else template.render(parse_messages(case["messages"]))
        assert tokenizer.encode(text) == case["prompt_token_ids"], case["id"]
        assert tokenizer.decode(case["output_token_ids"]) == case["output_text"], case["id"]


def test_smollm2_encodes_and_decodes_exactly(smollm2: Tokenizer) -> None:
    for case in lines("tokenizer-smollm2-135m-instruct.jsonl"):
        assert smollm2.encode(case["text"]) == case["token_ids"], case["id"]
        assert smollm2.decode(case["token_ids"]) == case["decoded_skip_special"], case["id"]


def test_smollm2_streams_the_same_text_token_by_token(smollm2: Tokenizer) -> None:
    for case in lines("smollm2-135m-instruct.jsonl"):
        detokenizer = IncrementalDetokenizer(smollm2)
        chunks = [detokenizer.push([token_id]) for token_id in case["output_token_ids"]]
        assert "".join(chunks) + detokenizer.flush() == case["output_text"], case["id"]


def test_smollm2_prompts_are_exact(smollm2_directory: Path) -> None:
    check_prompts_and_outputs("smollm2-135m-instruct.jsonl", smollm2_directory)


def test_qwen_coder_prompts_are_exact(qwen_coder_directory: Path) -> None:
    check_prompts_and_outputs("qwen2.5-coder-0.5b-instruct.jsonl", qwen_coder_directory)


def test_smollm2_ends_with_im_end(smollm2: Tokenizer) -> None:
    assert smollm2.eos_ids == (2,)
    assert smollm2.vocab_size == 49152
    assert 0 < smollm2.fewest_tokens(10_000_000) <= 10_000_000
