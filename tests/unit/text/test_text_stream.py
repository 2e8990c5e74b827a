from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.text.text_stream import TextDelta, TextStream
from baton.text.tokenizer import Tokenizer

FIXTURES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
STOPS = st.lists(st.text(alphabet="ab th\n", min_size=1, max_size=4), max_size=3)


def ids_of(tokenizer: Tokenizer, *contents: str | bytes) -> list[int]:
    """One token for each content."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[content.encode() if isinstance(content, str) else content] for content in contents]


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    of_text = st.text(alphabet="ab th\n日🙂", max_size=20).map(tokenizer.encode)
    return data.draw(of_text | st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))


def run(stream: TextStream, ids: list[int], group: int) -> tuple[str, int]:
    texts: list[str] = []
    tokens = 0
    for start in range(0, len(ids), group):
        delta = stream.extend(ids[start : start + group])
        texts.append(delta.text)
        tokens += delta.tokens
        if delta.stop_matched is not None:
            return "".join(texts), tokens
    return "".join(texts) + stream.finish().text, tokens


def test_the_token_that_completes_the_stop_is_the_last_one_counted(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ["STOP"])
    ids = ids_of(byte_level, " the", "x", "S", "T", "O", "P", "y", "z")
    delta = stream.extend(ids)
    assert delta == TextDelta(" thex", "STOP", 6)
    assert (stream.tokens, stream.stop_matched) == (6, "STOP")
    assert stream.push(ids[-1]) == TextDelta("", "STOP", 0)
    assert stream.finish() == TextDelta("", "STOP", 0)
    assert stream.tokens == 6


def test_a_stop_inside_one_token_cuts_its_text_but_counts_it(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ["h"])
    assert stream.push(ids_of(byte_level, " the")[0]) == TextDelta(" t", "h", 1)


def test_include_stop_delivers_the_stop_but_nothing_after_it(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ["h"], include_stop=True)
    assert stream.push(ids_of(byte_level, " the")[0]) == TextDelta(" th", "h", 1)


def test_held_text_comes_when_the_answer_ends_without_the_stop(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, ["\n\nUser"])
    assert stream.extend(ids_of(byte_level, "a", "\n\n", "U", b"\xf0\x9f")) == TextDelta("a", None, 4)
    assert stream.finish() == TextDelta("\n\nU\ufffd", None, 0)


def test_the_text_of_a_special_token_works_as_a_stop(byte_level: Tokenizer) -> None:
    user = byte_level.token_id("<|user|>") or -1
    stream = TextStream(byte_level, ["<|user|>", "\n\nx"])
    assert stream.extend([*ids_of(byte_level, "a", "\n\n"), user, *ids_of(byte_level, "b")]) == TextDelta(
        "a\n\n", "<|user|>", 3
    )
    early = TextStream(byte_level, ["<|user|>"], min_tokens=1)
    assert early.extend([user, *ids_of(byte_level, "a"), user]) == TextDelta("a", "<|user|>", 3)
    included = TextStream(byte_level, ["<|user|>"], include_stop=True)
    assert included.extend([*ids_of(byte_level, "a"), user]).text == "a<|user|>"
    assert TextStream(byte_level, ["\n\nx"]).extend([*ids_of(byte_level, "a"), user]) == TextDelta("a", None, 2)


def test_a_stop_within_min_tokens_is_text_but_one_that_ends_later_matches(byte_level: Tokenizer) -> None:
    ids = ids_of(byte_level, "a", "b", "x", "a", "b")
    assert TextStream(byte_level, ["ab"], min_tokens=2).extend(ids) == TextDelta("abx", "ab", 5)
    assert TextStream(byte_level, ["ab"], min_tokens=1).extend(ids) == TextDelta("", "ab", 2)


@FIXTURES
@given(data=st.data(), stops=STOPS, group=st.integers(1, 7), min_tokens=st.integers(0, 6))
def test_text_and_count_do_not_depend_on_how_tokens_are_grouped(
    tokenizer: Tokenizer, data: st.DataObject, stops: list[str], group: int, min_tokens: int
) -> None:
    ids = draw_ids(data, tokenizer)
    one_by_one = TextStream(tokenizer, stops, min_tokens=min_tokens)
    grouped = TextStream(tokenizer, stops, min_tokens=min_tokens)
    assert run(one_by_one, ids, 1) == run(grouped, ids, group)
    assert one_by_one.stop_matched == grouped.stop_matched


@FIXTURES
@given(data=st.data(), stops=STOPS, min_tokens=st.integers(0, 4))
def test_the_answer_ends_with_the_first_token_whose_text_completes_a_stop(
    tokenizer: Tokenizer, data: st.DataObject, stops: list[str], min_tokens: int
) -> None:
    ids = draw_ids(data, tokenizer)
    stream = TextStream(tokenizer, stops, min_tokens=min_tokens)
    before = tokenizer.decode(ids[:min_tokens])  # ends with U+FFFD: a character may be cut here, and its length unknown
    early = len(before)
    for tokens in range(min_tokens + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:tokens])
        ends = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
        if ends and not before.endswith("\ufffd"):
            stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
            assert run(stream, ids, 1) == (text[: ends[0] - len(stop)], tokens)
            assert stream.stop_matched == stop
            return
    assert run(stream, ids, 1)[1] == len(ids) or before.endswith("\ufffd")


def test_a_stop_of_byte_tokens_ends_the_answer_with_its_own_last_byte(sentence_piece: Tokenizer) -> None:
    newline = sentence_piece.token_id("<0x0A>") or -1
    the = sentence_piece.token_id("▁the") or -1
    stream = TextStream(sentence_piece, ["\n"])
    assert stream.extend([the, newline, the]) == TextDelta("the", "\n", 2)
    late = TextStream(sentence_piece, ["\n"], min_tokens=2)
    assert late.extend([the, newline, the, newline]) == TextDelta("the\n the", "\n", 4)


def test_a_byte_token_stop_within_min_tokens_stays_text_when_its_run_goes_on(sentence_piece: Tokenizer) -> None:
    ids = [sentence_piece.token_id(f"<0x{byte:02X}>") or -1 for byte in "é日é".encode()]
    for min_tokens in range(2, 7):
        assert TextStream(sentence_piece, ["é"], min_tokens=min_tokens).extend(ids) == TextDelta("é日", "é", 7)


@FIXTURES
@given(data=st.data(), stops=STOPS, delivered=st.integers(0, 30))
def test_a_replayed_stream_goes_on_without_repeating_or_losing_text(
    tokenizer: Tokenizer, data: st.DataObject, stops: list[str], delivered: int
) -> None:
    ids = draw_ids(data, tokenizer)
    first, whole = TextStream(tokenizer, stops), TextStream(tokenizer, stops)
    before = first.extend(ids[:delivered]).text
    second = TextStream(tokenizer, stops)
    second.replay(ids[:delivered])
    after = second.extend(ids[delivered:]).text + second.finish().text
    assert before + after == whole.extend(ids).text + whole.finish().text
    assert (second.tokens, second.stop_matched) == (whole.tokens, whole.stop_matched)
