"""Ids to text, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from baton.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Gives out text as soon as it is certain: joined, it equals ``tokenizer.decode`` of all the ids.

    Bytes of a character that is split over tokens are held until it is whole, so U+FFFD appears only for bytes that no
    later token can complete. In a byte-fallback vocabulary a run of byte tokens is held until a text token ends it.
    Special tokens and ids outside the vocabulary add nothing. Each token costs O(its bytes).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._assembly = tokenizer.pieces.assembly()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the new text, which may be empty."""
        text = ""
        for token_id in token_ids:
            if token_id not in self._tokenizer.special_ids:
                text += self._assembly.add(self._tokenizer.piece(token_id))
        return text

    def tentative(self) -> str:
        """Text that is held but that ``flush`` would give out now; empty if it would give out U+FFFD."""
        return self._assembly.tentative()

    def flush(self) -> str:
        """End the text: returns what was held, with U+FFFD for bytes that never became a character."""
        return self._assembly.close()
