from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest, ModelError, TokenizerMissing
from baton.text.tokenizer import Tokenizer, load_tokenizer


def directory_with(tmp_path: Path, tokenizer: object, **files: object) -> Path:
    content = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (tmp_path / "tokenizer.json").write_text(content)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


SMALL: dict[str, object] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2, "</s>": 3}, "merges": []},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_byte_level_text_survives_the_round_trip(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text


def test_special_tokens_are_read_from_text_and_left_out_of_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|user|>he<|end|>")
    assert [ids[0], ids[2]] == [byte_level.token_id("<|user|>"), byte_level.token_id("<|end|>")]
    assert len(ids) == 3
    assert byte_level.decode(ids) == "he"
    assert byte_level.eos_ids == (byte_level.token_id("<|end|>"),)
    assert byte_level.bos_id == byte_level.token_id("<|user|>")


def test_a_user_defined_token_is_one_token_and_stays_in_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<tool>")
    assert ids == [byte_level.token_id("<tool>")]
    assert byte_level.decode(ids) == "<tool>"


def test_token_bytes_are_those_of_the_text(byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.encode(" the")[0]) == b" the"
    assert sentence_piece.token_bytes(sentence_piece.token_id("▁the") or -1) == b" the"
    assert sentence_piece.token_bytes(sentence_piece.token_id("<0xE4>") or -1) == b"\xe4"


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_an_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id]) == ""


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        tokenizer.encode("a\ud800b")
    assert caught.value.field == "text"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="12 the\n", max_size=200))
def test_fewest_tokens_never_exceeds_the_true_count(byte_level: Tokenizer, text: str) -> None:
    fewest = byte_level.fewest_tokens(len(text.encode()))
    assert fewest <= len(byte_level.encode(text))
    assert fewest > 0 or not text


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_corrupt_tokenizer_is_named(tmp_path: Path) -> None:
    for content in (
        '{"model": ',
        "[]",
        json.dumps({**SMALL, "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}),
    ):
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            load_tokenizer(directory_with(tmp_path, content))


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "Sequence", "decoders": []}]
)
def test_a_decoder_of_another_kind_is_refused(tmp_path: Path, decoder: object) -> None:
    with pytest.raises(ModelError, match="decoder"):
        load_tokenizer(directory_with(tmp_path, {**SMALL, "decoder": decoder}))


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
    directory = directory_with(tmp_path, SMALL, tokenizer_config=config)
    assert (load_tokenizer(directory).eos_ids, load_tokenizer(directory).bos_id) == ((3,), 2)
    directory_with(tmp_path, SMALL, config={"eos_token_id": 1})
    assert load_tokenizer(directory).eos_ids == (1,)
    directory_with(tmp_path, SMALL, generation_config={"eos_token_id": [0, 3]})
    assert load_tokenizer(directory).eos_ids == (0, 3)
    directory_with(tmp_path, SMALL, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ModelError, match="eos_token_id"):
        load_tokenizer(directory)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    limits = {
        "truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
    }
    assert load_tokenizer(directory_with(tmp_path, {**SMALL, **limits})).encode("abab") == [0, 1, 0, 1]


def test_add_special_puts_bos_where_the_model_wants_it(sentence_piece: Tokenizer) -> None:
    assert sentence_piece.encode("the", add_special=True) == [1, *sentence_piece.encode("the")]
