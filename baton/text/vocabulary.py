"""How the strings in a vocabulary stand for bytes, and how a stream of them becomes text again.

Two families cover the models that we serve. *Byte-level* (GPT-2, Llama 3, Qwen): every byte is written as one printable
character. *SentencePiece-style* (Llama 2, Mistral): pieces are text with U+2581 for the space, and bytes outside the
vocabulary are written `<0x41>`. Both read the ``decoder`` of a tokenizer.json and give exactly what the tokenizers
library gives for the whole sequence, however it is cut.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from baton.core.errors import ModelError

REPLACEMENT = "\ufffd"

# A token's content. ``bytes`` join their neighbours before they are decoded; ``str`` is whole text by itself.
Piece = bytes | str

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Assembly(Protocol):
    """Text under construction: pieces in, text out as soon as no later piece can change it."""

    def add(self, piece: Piece) -> str: ...

    def tentative(self) -> str:
        """What ``close`` would return if it came now; empty if that would hold U+FFFD."""
        ...

    def close(self) -> str:
        """The rest; bytes that never became a character come out as U+FFFD."""
        ...


class Pieces(Protocol):
    """The reading of one vocabulary."""

    def parse(self, token: str) -> Piece: ...

    def assembly(self) -> Assembly: ...


def _byte_alphabet() -> dict[str, int]:
    """The published GPT-2 alphabet: printable Latin-1 stands for itself, other bytes are moved to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(moved)})
    return alphabet


BYTE_OF_CHARACTER: Mapping[str, int] = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteLevelPieces:
    """A token is a run of bytes; one that holds a character outside the byte alphabet is its own UTF-8."""

    def parse(self, token: str) -> Piece:
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()

    def assembly(self) -> Assembly:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, piece: Piece) -> str:
        return self._decoder.decode(piece if isinstance(piece, bytes) else piece.encode())

    def tentative(self) -> str:
        return ""

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """Text pieces with ``replacements``, and `<0x41>` bytes where ``byte_fallback`` is set.

    Up to ``strip_count`` leading ``strip_character`` are taken off the whole text (the space that encoding put there).
    """

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    strip_character: str = " "
    strip_count: int = 0

    def parse(self, token: str) -> Piece:
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token

    def assembly(self) -> Assembly:
        return _SentenceStream(self.strip_character, self.strip_count)


class _SentenceStream:
    """A run of byte pieces is decoded as one: if it is not valid UTF-8 as a whole, each of its bytes becomes U+FFFD.

    So a run is held until a text piece ends it, else a streamed character could turn out to be wrong.
    """

    def __init__(self, strip_character: str, strip_count: int) -> None:
        self._run = bytearray()
        self._strip_character = strip_character
        self._to_strip = strip_count

    def add(self, piece: Piece) -> str:
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._end_run(piece)

    def tentative(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[self._to_strip_from(text) :]

    def close(self) -> str:
        return self._end_run("")

    def _end_run(self, piece: str) -> str:
        try:
            text = self._run.decode() + piece
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run) + piece
        self._run.clear()
        stripped = self._to_strip_from(text)
        self._to_strip = self._to_strip - stripped if stripped == len(text) else 0
        return text[stripped:]

    def _to_strip_from(self, text: str) -> int:
        """How many characters to take off the front of this text, which follows all that was given out."""
        leading = len(text) - len(text.lstrip(self._strip_character))
        return min(leading, self._to_strip)


def parse_decoder(decoder: object) -> Pieces:
    """Read the ``decoder`` of a tokenizer.json.

    Raises ModelError for a kind that is neither byte-level nor SentencePiece-style.
    """
    steps = _steps(decoder)
    if len(steps) == 1 and steps[0].get("type") == "ByteLevel":
        return ByteLevelPieces()
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    strip_character, strip_count = " ", 0
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(content), "start": int(count), "stop": 0} if fused:
                strip_character, strip_count = content, count
            case _:
                raise ModelError(f"tokenizer.json: decoder: unsupported step {step}")
    if not fused:
        raise ModelError(f"tokenizer.json: decoder: unsupported, got {decoder}")
    return SentencePieces(tuple(replacements), byte_fallback, strip_character, strip_count)


def _steps(decoder: object) -> list[Mapping[str, object]]:
    match decoder:
        case {"type": "Sequence", "decoders": list()}:
            return cast("dict[str, list[Mapping[str, object]]]", decoder)["decoders"]
        case {"type": str()}:
            return [cast("Mapping[str, object]", decoder)]
        case _:
            raise ModelError(f"tokenizer.json: decoder: expected an object with a type, got {decoder}")
