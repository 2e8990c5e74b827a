"""A request's output as the client sees it: ids in, deliverable text and stop matches out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.text.detokenize import IncrementalDetokenizer
from baton.text.stop_strings import Delivery, StopMatcher
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added. ``tokens``: how many of them belong to the answer, to be delivered and charged (all of
    them, or up to the one that completed a stop string); ``stop_matched``: that stop string."""

    text: str = ""
    stop_matched: str | None = None
    tokens: int = 0


class TextStream:
    """Detokenizes one choice and matches its stop strings.

    The token whose text completes a stop string is the last of the answer: it counts, its text from the stop on is not
    delivered (all of it, with ``include_stop``), and any later token counts for nothing. A stop string that is the
    text of a special token matches that token. A stop string completed by one of the first ``min_tokens`` tokens is
    text like any other.

    The state after a token depends on the ids alone, not on how they were grouped: to go on after a migration, build a
    new stream and ``replay`` the ids that were already delivered.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._stop_tokens = {
            token_id: stop for stop in stops if (token_id := tokenizer.token_id(stop)) in tokenizer.special_ids
        }
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # Characters of text still held that come from the first ``min_tokens`` tokens.
        self._unmatched = 0
        self.tokens = 0
        """Tokens that belong to the answer so far, replayed ones included."""
        self.stop_matched: str | None = None
        """The stop string that ended the answer."""

    def push(self, token_id: int) -> TextDelta:
        """Add one token. After a match it counts for nothing."""
        if self.stop_matched is not None:
            return TextDelta(stop_matched=self.stop_matched)
        self.tokens += 1
        if token_id in self._stop_tokens and self.tokens > self._min_tokens:
            return self._stop_at(self._stop_tokens[token_id])
        text = self._detokenizer.push((token_id,))
        if self.tokens <= self._min_tokens:
            return TextDelta(self._push_unmatched(text), tokens=1)
        delivery = self._match(text)
        # A byte-fallback vocabulary holds a run of bytes that may yet turn out to be invalid; ending here it is not.
        if delivery.stop is None and (held := self._detokenizer.tentative()) and self._matcher.would_end(held):
            last = self._match(self._detokenizer.flush())
            delivery = Delivery(delivery.text + last.text, last.stop)
        self.stop_matched = delivery.stop
        return TextDelta(delivery.text, delivery.stop, 1)

    def extend(self, token_ids: Sequence[int]) -> TextDelta:
        """Add the tokens of one step; the same as pushing them one by one."""
        texts: list[str] = []
        before = self.tokens
        for token_id in token_ids:
            if self.stop_matched is not None:
                break
            texts.append(self.push(token_id).text)
        return TextDelta("".join(texts), self.stop_matched, self.tokens - before)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take in tokens whose text was delivered before; held text comes with the next push, as it would have."""
        self.extend(token_ids)

    def finish(self) -> TextDelta:
        """End the answer: returns the text still held, in which a stop string may yet be complete."""
        if self.stop_matched is not None:
            return TextDelta(stop_matched=self.stop_matched)
        delivery = self._match(self._detokenizer.flush())
        self.stop_matched = delivery.stop
        return TextDelta(delivery.text + self._matcher.flush(), delivery.stop)

    def _push_unmatched(self, text: str) -> str:
        held = len(self._detokenizer.tentative())
        self._unmatched = held if text else max(held, self._unmatched)
        return self._matcher.push_unmatched(text)

    def _match(self, text: str) -> Delivery:
        """Match the text that comes after ``min_tokens`` tokens."""
        if not text or not self._unmatched:
            return self._matcher.push(text)
        early, self._unmatched = self._unmatched, 0
        before = self._matcher.push_unmatched(text[:early])
        delivery = self._matcher.push(text[early:])
        return Delivery(before + delivery.text, delivery.stop)

    def _stop_at(self, stop: str) -> TextDelta:
        text = self.finish().text
        if self.stop_matched is None:
            self.stop_matched = stop
            text += stop if self._include_stop else ""
        return TextDelta(text, self.stop_matched, 1)
