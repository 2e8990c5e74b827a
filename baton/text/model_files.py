"""The small JSON files beside a model's weights, as far as text needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from baton.core.errors import ModelError

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> Mapping[str, object]:
    """The object in ``path``; an absent file reads as empty. Raises ModelError when it is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return cast("Mapping[str, object]", content)


def special_token_texts(directory: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` and their texts, as far as the model names them.

    Read from special_tokens_map.json (older directories), then tokenizer_config.json, which wins.
    """
    texts: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(directory / name)
        for key in _TOKEN_NAMES:
            match content.get(key):
                case str(text) | {"content": str(text)}:
                    texts[key] = text
                case None:
                    pass
                case other:
                    raise ModelError(f"{directory / name}: {key}: expected a token's text, got {other}")
    return texts


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """``eos_token_id`` of generation_config.json, else of config.json: one id or a list. Empty when neither has it."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        token_ids = cast("list[object]", value) if isinstance(value, list) else [value]
        if value is None or not token_ids:
            continue
        if any(not isinstance(token_id, int) for token_id in token_ids):
            raise ModelError(f"{directory / name}: eos_token_id: expected an id or a list of ids, got {value}")
        return tuple(cast("list[int]", token_ids))
    return ()
