"""Writes a Hugging Face tokenizer from the metadata of a GGUF file.

A GGUF only names its pre-tokenizer, so the descriptions are here: the names are llama.cpp's, the patterns those that
the models publish in their own tokenizer.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from baton.core.errors import ModelError
from baton.text.gguf_vocabulary import GgufVocabulary, TokenKind, read_vocabulary

Json = Mapping[str, object]

_SPACE = "\u2581"  # SentencePiece's sign for a space
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> Json:
    """Bytes to printable characters; with ``use_regex`` the text is split first by the GPT-2 pattern."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(digits: str) -> Json:
    """The pattern that GPT-4 and its followers share, which differs in how many ``digits`` go together."""
    pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_PUNCTUATION_AND_SPACE}"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_GPT2 = _byte_level(use_regex=True)
_SMOLLM: Json = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
}
_QWEN2 = _split_then_bytes(r"\p{N}")
_LLAMA3 = _split_then_bytes(r"\p{N}{1,3}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")

_PRE_TOKENIZERS: Mapping[str, Json] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    **dict.fromkeys(_QWEN2_NAMES, _QWEN2),
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3),
}


def write_tokenizer(gguf_path: Path, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``directory``, and generation_config.json if it has none.

    tokenizer.json comes last, so a directory that has it is complete.
    Covers byte-level BPE ("gpt2") with a known pre-tokenizer and SentencePiece BPE ("llama"). Raises ModelError for a
    file that is corrupt, or whose tokenizer model or pre-tokenizer is not supported, by name.
    """
    vocabulary = read_vocabulary(gguf_path)
    match vocabulary.model:
        case "gpt2":
            tokenizer = _byte_level_tokenizer(vocabulary)
        case "llama":
            tokenizer = _sentence_piece_tokenizer(vocabulary)
        case other:
            raise ModelError(f"{vocabulary.file}: tokenizer.ggml.model: must be gpt2 or llama, got {other}")
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(vocabulary))
    if not (directory / "generation_config.json").exists():
        _write_json(directory / "generation_config.json", _generation_config(vocabulary))
    _write_json(directory / "tokenizer.json", tokenizer)


def _byte_level_tokenizer(vocabulary: GgufVocabulary) -> Json:
    name = vocabulary.pre_tokenizer
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"{vocabulary.file}: tokenizer.ggml.pre: must be one of {known}, got {name}")
    adds_bos = vocabulary.adds_bos if vocabulary.adds_bos is not None else name in _LLAMA3_NAMES
    return _tokenizer(
        vocabulary,
        adds_bos=adds_bos,
        normalizer={"type": "NFC"} if name in _QWEN2_NAMES else None,
        pre_tokenizer=_PRE_TOKENIZERS[name],
        decoder=_byte_level(use_regex=True),
        model={
            "type": "BPE",
            "vocab": _token_ids(vocabulary),
            "merges": [merge.split(" ", 1) for merge in vocabulary.merges],
            # Llama 3 takes a word that is a token as it is, even where no sequence of merges leads to it.
            "ignore_merges": name in _LLAMA3_NAMES,
        },
    )


def _sentence_piece_tokenizer(vocabulary: GgufVocabulary) -> Json:
    if not vocabulary.scores:
        raise ModelError(f"{vocabulary.file}: tokenizer.ggml.scores: missing")
    # A GGUF that says nothing stands for Llama 2, which puts a space before the text and BOS before that.
    adds_space = vocabulary.adds_space is not False
    to_pieces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    to_text: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return _tokenizer(
        vocabulary,
        adds_bos=vocabulary.adds_bos is not False,
        normalizer={"type": "Sequence", "normalizers": [*prefix, to_pieces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model={
            "type": "BPE",
            "vocab": _token_ids(vocabulary),
            "merges": _merges_by_score(vocabulary),
            "unk_token": vocabulary.text(vocabulary.unknown_id),
            "fuse_unk": True,
            "byte_fallback": TokenKind.BYTE in vocabulary.kinds,
        },
    )


def _tokenizer(
    vocabulary: GgufVocabulary,
    *,
    adds_bos: bool,
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    decoder: Json,
    model: Json,
) -> Json:
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary, adds_bos=adds_bos),
        "decoder": decoder,
        "model": model,
    }


def _token_ids(vocabulary: GgufVocabulary) -> dict[str, int]:
    """All tokens but unused ones, which only pad the embedding."""
    return {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind != TokenKind.UNUSED
    }


def _added_tokens(vocabulary: GgufVocabulary) -> list[Json]:
    """Tokens that are found in the text before anything else; user-defined ones are part of the text, not special."""
    return [
        {
            "id": token_id,
            "content": vocabulary.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.kinds[token_id] != TokenKind.USER_DEFINED,
        }
        for token_id in vocabulary.ids(TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)
    ]


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest: the same as merges ranked by that score."""
    ids = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.ids(TokenKind.NORMAL)}
    ranked = [
        (-vocabulary.scores[token_id], -cut, token[:cut], token[cut:])
        for token, token_id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _post_processor(vocabulary: GgufVocabulary, *, adds_bos: bool) -> Json | None:
    bos = vocabulary.bos_id if adds_bos else None
    eos = vocabulary.eos_id if vocabulary.adds_eos else None

    def special(token_id: int | None) -> list[Json]:
        return [] if token_id is None else [{"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": 0}}]

    added = [token_id for token_id in (bos, eos) if token_id is not None]
    if not added:
        return None
    return {
        "type": "TemplateProcessing",
        "single": [*special(bos), {"Sequence": {"id": "A", "type_id": 0}}, *special(eos)],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            vocabulary.tokens[token_id]: {
                "id": vocabulary.tokens[token_id],
                "ids": [token_id],
                "tokens": [vocabulary.tokens[token_id]],
            }
            for token_id in added
        },
    }


def _tokenizer_config(vocabulary: GgufVocabulary) -> Json:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": vocabulary.text(vocabulary.bos_id),
        "eos_token": vocabulary.text(vocabulary.eos_id),
        "unk_token": vocabulary.text(vocabulary.unknown_id),
        "pad_token": vocabulary.text(vocabulary.padding_id),
        "model_max_length": vocabulary.context_length,
        "chat_template": vocabulary.chat_template,
    }
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(vocabulary: GgufVocabulary) -> Json:
    """A chat model may end its turn with a token of its own beside EOS."""
    ends = list(dict.fromkeys(end for end in (vocabulary.eos_id, vocabulary.eot_id) if end is not None))
    config: dict[str, object] = {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": vocabulary.padding_id,
    }
    return {key: value for key, value in config.items() if value is not None}


def _write_json(path: Path, content: Json) -> None:
    """Write the whole file or nothing, also when two processes write it at once."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
