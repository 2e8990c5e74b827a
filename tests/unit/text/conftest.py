"""Two small vocabularies as GGUF files: one byte-level, one SentencePiece with byte fallback."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from baton.text.gguf_tokenizer import write_tokenizer
from baton.text.gguf_vocabulary import TokenKind
from baton.text.tokenizer import Tokenizer, load_tokenizer
from baton.text.vocabulary import BYTE_OF_CHARACTER

DATA = Path(__file__).parents[2] / "data"

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}

# Joined pieces of words, of digits, and of characters: tokens that begin or end inside a UTF-8 sequence.
JOINED = (
    " t",
    "he",
    " the",
    "12",
    "123",
    "\n\n",
    b"\xe2\x80",
    b"\xf0\x9f",
    b"\xf0\x9f\x99",
    b"\x82a",
    b"\xbd\xa0",
    "  ",
)
ADDED = (
    ("<|end|>", TokenKind.CONTROL),
    ("<|user|>", TokenKind.CONTROL),
    ("<tool>", TokenKind.USER_DEFINED),
    ("[PAD0]", TokenKind.UNUSED),
)


def spell(content: str | bytes) -> str:
    """The byte-level spelling of a token."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in (content.encode() if isinstance(content, str) else content))


def merges_for(contents: Sequence[str | bytes]) -> list[str]:
    """For each token the merge of its longest known beginning with the rest, which must be known too."""
    known = set(CHARACTER_OF_BYTE.values())
    merges: list[str] = []
    for token in map(spell, contents):
        cut = next(cut for cut in range(len(token) - 1, 0, -1) if token[:cut] in known and token[cut:] in known)
        merges.append(f"{token[:cut]} {token[cut:]}")
        known.add(token)
    return merges


def write_gguf(path: Path, fields: Callable[[Any], None], architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fields(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(writer: Any, pre_tokenizer: str = "gpt-2", unmerged: Sequence[str] = ()) -> None:
    """``unmerged``: further tokens that no merge leads to."""
    tokens = [*CHARACTER_OF_BYTE.values(), *map(spell, JOINED), *(token for token, _ in ADDED), *map(spell, unmerged)]
    kinds = [TokenKind.NORMAL] * (256 + len(JOINED)) + [kind for _, kind in ADDED] + [TokenKind.NORMAL] * len(unmerged)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges_for(JOINED))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_bos_token_id(tokens.index("<|user|>"))


@pytest.fixture(scope="session")
def sentence_piece_data() -> Any:
    return json.loads((DATA / "sentencepiece-small.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("byte-level")
    write_tokenizer(write_gguf(directory / "model.gguf", byte_level_fields), directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory, sentence_piece_data: Any) -> Tokenizer:
    def fields(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(sentence_piece_data["pieces"])
        writer.add_token_scores(sentence_piece_data["scores"])
        writer.add_token_types(sentence_piece_data["kinds"])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    directory = tmp_path_factory.mktemp("sentence-piece")
    write_tokenizer(write_gguf(directory / "model.gguf", fields), directory)
    return load_tokenizer(directory)


@pytest.fixture(params=["byte_level", "sentence_piece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each vocabulary in turn."""
    return request.getfixturevalue(request.param)
