from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ModelError
from baton.text.gguf_tokenizer import write_tokenizer
from baton.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.conftest import byte_level_fields, write_gguf


def converted(directory: Path, fields: Callable[[Any], None]) -> Tokenizer:
    write_tokenizer(write_gguf(directory / "model.gguf", fields), directory)
    return load_tokenizer(directory)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]


def test_sentence_piece_ids_and_text_equal_sentencepiece(sentence_piece: Tokenizer, sentence_piece_data: Any) -> None:
    assert len(sentence_piece_data["cases"]) > 100
    for case in sentence_piece_data["cases"]:
        assert sentence_piece.encode(case["text"]) == case["token_ids"]
        assert sentence_piece.decode(case["token_ids"]) == case["decoded"]


@pytest.mark.parametrize(
    ("pre_tokenizer", "digits"),
    [
        ("gpt-2", ["123", "12"]),
        ("default", ["123", "12"]),
        ("smollm", ["1", "2", "3", "1", "2"]),
        ("qwen2", ["1", "2", "3", "1", "2"]),
        ("llama-bpe", ["123", "12"]),
    ],
)
def test_digits_are_grouped_as_the_pre_tokenizer_says(tmp_path: Path, pre_tokenizer: str, digits: list[str]) -> None:
    tokenizer = converted(tmp_path, partial(byte_level_fields, pre_tokenizer=pre_tokenizer))
    assert pieces(tokenizer, "12312") == digits


def test_numbers_beyond_three_digits_break_only_in_llama_bpe(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    llama = converted(tmp_path / "a", partial(byte_level_fields, pre_tokenizer="llama-bpe"))
    assert pieces(llama, "11231") == ["1", "12", "3", "1"]
    (tmp_path / "b").mkdir()
    gpt2 = converted(tmp_path / "b", byte_level_fields)
    assert pieces(gpt2, "11231") == ["1", "123", "1"]


@pytest.mark.parametrize(("pre_tokenizer", "expected"), [("llama-bpe", ["zzz"]), ("gpt-2", ["z", "z", "z"])])
def test_only_llama_bpe_takes_a_word_that_no_merge_leads_to(
    tmp_path: Path, pre_tokenizer: str, expected: list[str]
) -> None:
    fields = partial(byte_level_fields, pre_tokenizer=pre_tokenizer, unmerged=["zzz"])
    assert pieces(converted(tmp_path, fields), "zzz") == expected


def test_qwen2_composes_characters_before_encoding(tmp_path: Path) -> None:
    tokenizer = converted(tmp_path, partial(byte_level_fields, pre_tokenizer="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_control_tokens_are_special_and_unused_ones_are_left_out(byte_level: Tokenizer) -> None:
    special = {byte_level.token_id("<|end|>"), byte_level.token_id("<|user|>")}
    assert byte_level.special_ids == special
    assert byte_level.token_id("[PAD0]") is None


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(True, True), (False, True), (True, False), (False, False)])
def test_adds_bos_and_eos_as_the_file_says(tmp_path: Path, *, adds_bos: bool, adds_eos: bool) -> None:
    def fields(writer: Any) -> None:
        byte_level_fields(writer)
        writer.add_add_bos_token(adds_bos)
        writer.add_add_eos_token(adds_eos)

    tokenizer = converted(tmp_path, fields)
    ids = tokenizer.encode("he", add_special=True)
    assert ids == [tokenizer.bos_id] * adds_bos + tokenizer.encode("he") + [*tokenizer.eos_ids] * adds_eos


def test_llama_bpe_opens_with_bos_where_the_file_says_nothing(tmp_path: Path) -> None:
    tokenizer = converted(tmp_path, partial(byte_level_fields, pre_tokenizer="llama-bpe"))
    assert tokenizer.encode("he", add_special=True)[0] == tokenizer.bos_id
    assert tokenizer.encode("he")[0] != tokenizer.bos_id


def test_writes_template_special_tokens_and_ends_of_generation(tmp_path: Path) -> None:
    def fields(writer: Any) -> None:
        byte_level_fields(writer)
        writer.add_chat_template("{{ bos_token }}")
        writer.add_eot_token_id(5)
        writer.add_context_length(77)

    tokenizer = converted(tmp_path, fields)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["eos_token"]) == ("{{ bos_token }}", "<|end|>")
    assert (config["bos_token"], config["model_max_length"]) == ("<|user|>", 77)
    assert tokenizer.eos_ids == (tokenizer.token_id("<|end|>"), 5)


def test_leaves_a_generation_config_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert converted(tmp_path, byte_level_fields).eos_ids == (9,)


def set_model(writer: Any) -> None:
    byte_level_fields(writer)
    del writer.kv_data[0]["tokenizer.ggml.model"]
    writer.add_tokenizer_model("bert")


def set_eos(writer: Any) -> None:
    byte_level_fields(writer)
    del writer.kv_data[0]["tokenizer.ggml.eos_token_id"]
    writer.add_eos_token_id(9999)


def set_kinds(writer: Any) -> None:
    byte_level_fields(writer)
    del writer.kv_data[0]["tokenizer.ggml.token_type"]
    writer.add_token_types([1, 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (partial(byte_level_fields, pre_tokenizer="tekken"), "tokenizer.ggml.pre: must be one of .*got tekken"),
        (set_model, "tokenizer.ggml.model: must be gpt2 or llama, got bert"),
        (set_eos, "tokenizer.ggml.eos_token_id: must be below 272, got 9999"),
        (set_kinds, "tokenizer.ggml.token_type: expected 272 entries, got 2"),
        (lambda writer: None, "tokenizer.ggml.tokens: missing"),
        (lambda writer: writer.add_tokenizer_model("llama"), "tokenizer.ggml.tokens: missing"),
    ],
)
def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path, fields: Callable[[Any], None], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", fields)
    with pytest.raises(ModelError, match=message):
        write_tokenizer(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 3, 100, 2000])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", byte_level_fields)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        write_tokenizer(path, tmp_path / "out")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf"):
        write_tokenizer(tmp_path / "absent.gguf", tmp_path)
