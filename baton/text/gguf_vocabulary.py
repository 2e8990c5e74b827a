"""Reads the tokenizer of a GGUF file. Needs the gguf package (and numpy with it): only conversion imports this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar, cast

import gguf

from baton.core.errors import ModelError

_T = TypeVar("_T")


class TokenKind(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What a GGUF says about its tokenizer; None or empty where it says nothing.

    ``kinds`` has one entry a token, ``scores`` too if there are any; ``merges`` are pairs joined by a space.
    """

    file: str
    model: str
    pre_tokenizer: str
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    merges: Sequence[str]
    scores: Sequence[float]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unknown_id: int | None
    padding_id: int | None
    adds_bos: bool | None
    adds_eos: bool | None
    adds_space: bool | None
    chat_template: str | None
    context_length: int | None

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def ids(self, *kinds: TokenKind) -> list[int]:
        """The ids of all tokens of these kinds, ascending."""
        return [token_id for token_id, kind in enumerate(self.kinds) if kind in kinds]


def read_vocabulary(path: Path) -> GgufVocabulary:
    """Read the tokenizer's metadata. Raises ModelError when the file is corrupt or lacks a part, naming it."""
    fields = _Fields(path)
    tokens = cast("list[str]", fields.required("tokenizer.ggml.tokens", list))
    architecture = fields.required("general.architecture", str)
    return GgufVocabulary(
        file=path.name,
        model=fields.required("tokenizer.ggml.model", str),
        pre_tokenizer=fields.optional("tokenizer.ggml.pre", str) or "default",
        tokens=tokens,
        kinds=_kinds(fields, len(tokens)),
        merges=cast("list[str]", fields.optional("tokenizer.ggml.merges", list) or []),
        scores=cast("list[float]", fields.per_token("tokenizer.ggml.scores", len(tokens))),
        bos_id=fields.token_id("bos", len(tokens)),
        eos_id=fields.token_id("eos", len(tokens)),
        eot_id=fields.token_id("eot", len(tokens)),
        unknown_id=fields.token_id("unknown", len(tokens)),
        padding_id=fields.token_id("padding", len(tokens)),
        adds_bos=fields.optional("tokenizer.ggml.add_bos_token", bool),
        adds_eos=fields.optional("tokenizer.ggml.add_eos_token", bool),
        adds_space=fields.optional("tokenizer.ggml.add_space_prefix", bool),
        chat_template=fields.optional("tokenizer.chat_template", str),
        context_length=fields.optional(f"{architecture}.context_length", int),
    )


def _kinds(fields: _Fields, tokens: int) -> list[TokenKind]:
    numbers = cast("list[int]", fields.per_token("tokenizer.ggml.token_type", tokens))
    try:
        return [TokenKind(number) for number in numbers] or [TokenKind.NORMAL] * tokens
    except ValueError as error:
        raise ModelError(f"{fields.file}: tokenizer.ggml.token_type: {error}") from error


class _Fields:
    """The key-value part of a GGUF file, read with its types checked."""

    def __init__(self, path: Path) -> None:
        self.file = path.name
        try:
            self._fields = gguf.GGUFReader(path).fields
        # What the reader raises for a file that is absent, is no GGUF, or is cut short.
        except (OSError, ValueError, LookupError, OverflowError) as error:
            raise ModelError(f"{path}: cannot be read as GGUF: {error}") from error

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        field = self._fields.get(key)
        if field is None:
            return None
        try:
            value = field.contents()
        except ValueError as error:
            raise ModelError(f"{self.file}: {key}: {error}") from error
        if not isinstance(value, kind):
            raise ModelError(f"{self.file}: {key}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    def required(self, key: str, kind: type[_T]) -> _T:
        value = self.optional(key, kind)
        if value is None:
            raise ModelError(f"{self.file}: {key}: missing")
        return value

    def per_token(self, key: str, tokens: int) -> list[object]:
        """A list with one entry a token, or an empty one when the key is absent."""
        values = cast("list[object]", self.optional(key, list) or [])
        if values and len(values) != tokens:
            raise ModelError(f"{self.file}: {key}: expected {tokens} entries, got {len(values)}")
        return values

    def token_id(self, name: str, tokens: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.optional(key, int)
        if token_id is not None and not 0 <= token_id < tokens:
            raise ModelError(f"{self.file}: {key}: must be below {tokens}, got {token_id}")
        return token_id
