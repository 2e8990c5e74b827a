from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.text.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, StopMatcher

FEW_LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, spelled out: the stop that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: end - len(found)], found
    return text, None


def deliver(matcher: StopMatcher, chunks: list[str]) -> tuple[list[str], str | None]:
    delivered: list[str] = []
    for chunk in chunks:
        delivery = matcher.push(chunk)
        delivered.append(delivery.text)
        if delivery.stop is not None:
            return delivered, delivery.stop
    return [*delivered, matcher.flush()], None


@settings(max_examples=500, deadline=None)
@given(chunks=st.lists(FEW_LETTERS, max_size=6), stops=STOPS)
def test_finds_the_same_stop_however_the_text_is_cut(chunks: list[str], stops: list[str]) -> None:
    delivered, stop = deliver(StopMatcher(stops), chunks)
    assert ("".join(delivered), stop) == search("".join(chunks), stops)


@settings(max_examples=300, deadline=None)
@given(text=FEW_LETTERS, stops=STOPS)
def test_holds_back_exactly_what_may_still_become_a_stop(text: str, stops: list[str]) -> None:
    delivery = StopMatcher(stops).push(text)
    openings = [stop[:size] for stop in stops for size in range(1, len(stop))]
    held = max((len(opening) for opening in openings if text.endswith(opening)), default=0)
    if delivery.stop is None:
        assert delivery.text == text[: len(text) - held]


@settings(max_examples=300, deadline=None)
@given(early=FEW_LETTERS, late=FEW_LETTERS, stops=STOPS)
def test_matches_only_stops_that_end_after_the_unmatched_part(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    early_text = matcher.push_unmatched(early)
    delivered, stop = deliver(matcher, [late])
    text = early + late
    ends = (
        (end, found)
        for end in range(len(early) + 1, len(text) + 1)
        if (found := max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None))
    )
    end, expected = next(ends, (len(text), None))
    if expected is not None and end - len(expected) < len(early_text):
        # Cannot be: what may open a stop is held.
        pytest.fail(f"{early_text!r} was delivered before {expected!r}")
    assert stop == expected
    assert early_text + "".join(delivered) == text[: end - len(expected or "")]


def test_a_stop_in_the_unmatched_part_is_text_that_is_not_held() -> None:
    matcher = StopMatcher(["ab", "bcd"])
    assert matcher.push_unmatched("xab") == "xa"
    assert matcher.push_unmatched("cda") == "bcd"
    assert StopMatcher(["ab"]).push_unmatched("xab") == "xab"


def test_delivers_the_stop_when_asked_to_include_it() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.push("one E").text == "one "
    delivery = matcher.push("ND two")
    assert (delivery.text, delivery.stop) == ("END", "END")


def test_delivers_everything_at_once_without_stops() -> None:
    assert StopMatcher().push("text").text == "text"


def test_gives_out_the_held_text_when_the_text_ends() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n\nUse").text == "Hello"
    assert matcher.flush() == "\n\nUse"


@pytest.mark.parametrize(
    ("stops", "field"),
    [
        (["a", ""], "stop_strings[1]"),
        (["x" * (MAX_STOP_CHARACTERS + 1)], "stop_strings[0]"),
        (["a"] * (MAX_STOP_STRINGS + 1), "stop_strings"),
    ],
)
def test_refuses_stops_beyond_the_limits_naming_the_entry(stops: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(stops)
    assert caught.value.field == field
    assert "must have" in caught.value.message or "at most" in caught.value.message
