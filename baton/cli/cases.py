"""Case lines: the JSON form of requests that ``baton generate`` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.core.errors import ConfigError, InvalidRequest
from baton.core.types import ChatMessage, GenerateRequest, Sampling

_PROMPTS = ("prompt_token_ids", "text", "messages")
_KINDS = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_NAMES = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
_SAMPLING = {f.name: str(f.type) for f in dataclasses.fields(Sampling) if f.name not in ("seed", "logit_bias")}
_STOP_RULES = {"min_tokens": "int", "ignore_eos": "bool"}
_DIRECT = {
    "model": "str",
    "request_id": "str",
    "timeout": "float",
    "max_tokens": "int",
    "seed": "int",
    "n": "int",
    "logprobs": "int",
    "prompt_logprobs": "int",
}
_KNOWN = {"id", "stop", "stop_token_ids", "logit_bias", *_PROMPTS, *_SAMPLING, *_STOP_RULES, *_DIRECT}


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    request: GenerateRequest


def read_cases(path: Path, defaults: GenerateRequest) -> Iterator[Case]:
    """One case a line; blank lines are skipped. InvalidRequest names the line and the field."""
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _numbered(path, number, line, defaults, seen)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path.name}: not UTF-8: {error.reason}", field="line") from error
    except OSError as error:
        raise ConfigError(f"generate: --input {path}: cannot be read: {error.strerror}") from error


def _numbered(path: Path, number: int, line: str, defaults: GenerateRequest, seen: set[str]) -> Case:
    """The case of line ``number``; its id joins ``seen``, which must not hold it."""
    where = f"{path.name} line {number}"
    try:
        case = parse_case(json.loads(line, object_pairs_hook=_object), defaults)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", field=error.field) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON that can be read: {error}", field="line") from error
    if case.id in seen:
        raise InvalidRequest(f"{where}: id: must be unique in the file, got {case.id!r} again", field="id")
    seen.add(case.id)
    return case


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object whose names differ: of two values for one name, one would be dropped."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{twice}: appears twice in one object", field=twice)
    return found


def parse_case(document: object, defaults: GenerateRequest) -> Case:
    """A case from its JSON object; what it leaves out comes from ``defaults``."""
    if not isinstance(document, dict):
        raise InvalidRequest(f"a case must be a JSON object, got {type(document).__name__}")
    given = cast(dict[str, Any], document)
    for name in given:
        if name not in _KNOWN:
            raise InvalidRequest(f"{name}: unknown field; known are {', '.join(sorted(_KNOWN))}", field=name)
    case_id = _checked("id", given.get("id"), "str")
    prompts = [name for name in _PROMPTS if name in given]
    if len(prompts) != 1:
        got = " and ".join(prompts) or "none"
        raise InvalidRequest(f"prompt: must be exactly one of {', '.join(_PROMPTS)}, got {got}", field="prompt")
    return Case(case_id, _request(given, defaults))


def _request(given: dict[str, Any], defaults: GenerateRequest) -> GenerateRequest:
    sampling, rules, direct = (_group(given, kinds) for kinds in (_SAMPLING, _STOP_RULES, _DIRECT))
    if "logit_bias" in given:
        sampling["logit_bias"] = _logit_bias(given["logit_bias"])
    if "stop_token_ids" in given:
        rules["stop_token_ids"] = _integers("stop_token_ids", given["stop_token_ids"])
    if "stop" in given:
        direct["stop_strings"] = _strings("stop", given["stop"])
    return dataclasses.replace(
        defaults,
        sampling=dataclasses.replace(defaults.sampling, **sampling),
        stop=dataclasses.replace(defaults.stop, **rules),
        **direct,
        **_prompt(given),
    )


def _group(given: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    return {name: _checked(name, given[name], kind) for name, kind in kinds.items() if name in given}


def _checked(name: str, value: Any, kind: str) -> Any:
    """``value``, which must be of ``kind``. (A bool is an int to Python, and to nobody else.)"""
    if isinstance(value, bool) is not (kind == "bool") or not isinstance(value, _KINDS[kind]):
        raise InvalidRequest(f"{name}: must be {_NAMES[kind]}, got {_short(value)}", field=name)
    try:
        if isinstance(value, str):
            value.encode("utf-8")
        return float(value) if kind == "float" else value
    except (OverflowError, UnicodeEncodeError) as error:  # half of a surrogate pair is valid JSON, but no text
        raise InvalidRequest(f"{name}: cannot be sent: {error}", field=name) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _prompt(given: dict[str, Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"text": None, "prompt_token_ids": None, "messages": None}
    if "text" in given:
        prompt["text"] = _checked("text", given["text"], "str")
    elif "prompt_token_ids" in given:
        prompt["prompt_token_ids"] = _integers("prompt_token_ids", given["prompt_token_ids"])
    else:
        entries = _list("messages", given["messages"])
        prompt["messages"] = tuple(_message(index, entry) for index, entry in enumerate(entries))
    return prompt


def _message(index: int, entry: Any) -> ChatMessage:
    where = f"messages[{index}]"
    fields = cast(dict[str, Any], entry) if isinstance(entry, dict) else {}
    if set(fields) != {"role", "content"}:
        raise InvalidRequest(
            f"{where}: must have exactly role and content, got {_short(cast(object, entry))}", field=where
        )
    role, content = (_checked(f"{where}.{name}", fields[name], "str") for name in ("role", "content"))
    return ChatMessage(role, content)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}: must be a list, got {_short(value)}", field=name)
    return cast(list[Any], value)


def _integers(name: str, values: Any) -> tuple[int, ...]:
    return tuple(_checked(f"{name}[{index}]", value, "int") for index, value in enumerate(_list(name, values)))


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        return (values,)
    return tuple(_checked(f"{name}[{index}]", value, "str") for index, value in enumerate(_list(name, values)))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """An object from token id to bias, as JSON writes it: with the ids as strings."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"logit_bias: must be an object, got {_short(value)}", field="logit_bias")
    found: list[tuple[int, float]] = []
    for token, bias in cast(dict[str, Any], value).items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias: must be keyed by token ids, got {_short(token)}", field="logit_bias")
        found.append((int(token), _checked(f"logit_bias[{token}]", bias, "float")))
    return tuple(found)
