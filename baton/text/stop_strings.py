"""Finds stop strings in a text that arrives in pieces, and delivers only what cannot be part of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Delivery:
    """Text that may be given out; with ``stop`` set it is the last."""

    text: str
    stop: str | None = None


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raise InvalidRequest, naming the entry, for an empty or too long stop string, or too many."""
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest.out_of_range("stop_strings", len(stops), f"at most {MAX_STOP_STRINGS} entries")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            limit = f"must have 1 to {MAX_STOP_CHARACTERS} characters"
            raise InvalidRequest.out_of_range(f"stop_strings[{index}]", len(stop), limit)


class _Automaton:
    """Aho and Corasick 1975: a trie of the stops, where a node stands for the longest suffix read that opens one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]  # the longest stop that ends at the node
        self.held: list[int] = [0]  # characters that may still grow into a stop
        self._fallback: list[int] = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, 1):
            child = self.children[node].get(character)
            if child is None:
                child = len(self.children)
                self.children[node][character] = child
                self.children.append({})
                self.found.append(None)
                self.held.append(depth)
                self._fallback.append(0)
            node = child
        self.found[node] = stop

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            fallback = self._fallback[node]
            self.found[node] = self.found[node] or self.found[fallback]
            if not self.children[node]:
                self.held[node] = self.held[fallback]
            for character, child in self.children[node].items():
                self._fallback[child] = self.next(fallback, character)
                queue.append(child)

    def next(self, node: int, character: str) -> int:
        while (child := self.children[node].get(character)) is None and node:
            node = self._fallback[node]
        return child or 0


class StopMatcher:
    """Matches several stop strings at once; the result does not depend on how the text is cut.

    The stop that is complete first wins; of those that end at the same character, the longest. The stop itself is not
    delivered unless ``include_stop``. Costs O(1) a character, whatever the stops. Raises InvalidRequest as
    ``check_stop_strings``.
    """

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        check_stop_strings(stops)
        self._automaton = _Automaton(stops)
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._include_stop = include_stop
        self._node = 0
        self._held = ""

    def push(self, text: str) -> Delivery:
        """Add text. When a stop is complete, text after it is dropped and nothing may be pushed any more."""
        if not self._stops:
            return Delivery(text)
        automaton, node = self._automaton, self._node
        for index, character in enumerate(text):
            node = automaton.next(node, character)
            if (stop := automaton.found[node]) is not None:
                seen = self._held + text[: index + 1]
                self._held = ""
                return Delivery(seen if self._include_stop else seen[: len(seen) - len(stop)], stop)
        return Delivery(self._advance(node, text))

    def push_unmatched(self, text: str) -> str:
        """Add text in which no stop may end; one may begin there and end later. Returns the text to deliver."""
        node = self._node
        for character in text:
            node = self._automaton.next(node, character)
        return self._advance(node, text)

    def would_end(self, text: str) -> bool:
        """Whether a stop would be complete with the last character of ``text``, which is not empty and not added."""
        tail = text[-self._longest :] if len(text) >= self._longest else self._held + text
        return tail.endswith(self._stops)

    def flush(self) -> str:
        """End the text without a match: returns what was held."""
        self._node, held, self._held = 0, self._held, ""
        return held

    def _advance(self, node: int, text: str) -> str:
        seen = self._held + text
        certain = len(seen) - self._automaton.held[node]
        self._node, self._held = node, seen[certain:]
        return seen[:certain]
