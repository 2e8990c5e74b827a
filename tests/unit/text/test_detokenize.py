from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.text.detokenize import IncrementalDetokenizer
from baton.text.tokenizer import Tokenizer

FIXTURES = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TEXTS = st.text() | st.sampled_from(
    ["日本語のテキスト", "👩‍👩‍👧‍👦🙂", "naïve — “x”", "한국어 عربى", " the 123<|end|>x", "\u2581 a"]
)


def stream(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    """Push the ids in runs of the given lengths, then flush."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    chunks: list[str] = []
    rest = token_ids
    for cut in cuts:
        chunks.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    return [*chunks, detokenizer.push(rest), detokenizer.flush()]


@FIXTURES
@given(data=st.data(), cuts=st.lists(st.integers(0, 5), max_size=30))
def test_joined_chunks_of_any_ids_equal_the_whole(tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@FIXTURES
@given(data=st.data())
def test_joined_chunks_of_single_bytes_equal_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    single = [token_id for token_id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token_id)) == 1]
    ids = data.draw(st.lists(st.sampled_from(single), max_size=40))
    assert "".join(stream(tokenizer, ids, [1] * len(ids))) == tokenizer.decode(ids)


@FIXTURES
@given(text=TEXTS)
def test_text_never_shows_a_replacement_character_before_the_flush(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    chunks = stream(tokenizer, ids, [1] * len(ids))
    assert "".join(chunks) == tokenizer.decode(ids)
    assert "".join(chunks).count("\ufffd") == text.count("\ufffd")


def test_a_split_character_comes_whole_with_its_last_byte(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    ids = {byte_level.token_bytes(token_id): token_id for token_id in reversed(range(byte_level.vocab_size))}
    assert [detokenizer.push([ids[bytes([byte])]]) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_an_unfinished_character_comes_out_as_replacement_at_the_flush(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    ids = {byte_level.token_bytes(token_id): token_id for token_id in reversed(range(byte_level.vocab_size))}
    assert detokenizer.push([ids[b"a"], ids[b"\xf0\x9f"]]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_run_of_byte_tokens_is_judged_as_one(sentence_piece: Tokenizer) -> None:
    def ids(content: bytes) -> list[int]:
        return [sentence_piece.token_id(f"<0x{byte:02X}>") or -1 for byte in content]

    space_a = sentence_piece.token_id("▁a") or -1
    detokenizer = IncrementalDetokenizer(sentence_piece)
    assert detokenizer.push(ids("é".encode())) == ""
    assert detokenizer.push([space_a]) == "é a"
    assert detokenizer.push([*ids("é".encode()), *ids(b"\xff"), space_a]) == "\ufffd\ufffd\ufffd a"
    assert detokenizer.push(ids("日".encode())) == ""
    assert detokenizer.flush() == "日"
