"""Case lines: the JSON form of requests that ``baton generate`` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.core.errors import InvalidRequest
from baton.core.types import ChatMessage, GenerateRequest, Sampling, StopRules

_PROMPTS = ("prompt_token_ids", "text", "messages")
_SAMPLING = {f.name for f in dataclasses.fields(Sampling)} - {"seed", "logit_bias"}
_STOP_RULES = {"min_tokens", "stop_token_ids", "ignore_eos"}
_DIRECT = {"max_tokens", "seed", "n", "logprobs", "prompt_logprobs", "model", "request_id", "timeout"}
_KNOWN = {"id", "stop", "logit_bias", *_PROMPTS, *_SAMPLING, *_STOP_RULES, *_DIRECT}


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    request: GenerateRequest


def read_cases(path: Path, defaults: GenerateRequest) -> Iterator[Case]:
    """One case a line; blank lines are skipped. InvalidRequest names the line and the field."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield parse_case(json.loads(line), defaults)
            except json.JSONDecodeError as error:
                raise InvalidRequest(f"{path.name} line {number}: not JSON: {error.msg}", field="line") from error
            except InvalidRequest as error:
                raise InvalidRequest(f"{path.name} line {number}: {error.message}", field=error.field) from error


def parse_case(document: object, defaults: GenerateRequest) -> Case:
    """A case from its JSON object; what it leaves out comes from ``defaults``."""
    if not isinstance(document, dict):
        raise InvalidRequest(f"a case must be a JSON object, got {type(document).__name__}")
    given = cast(dict[str, Any], document)
    for name in given:
        if name not in _KNOWN:
            raise InvalidRequest(f"{name}: unknown field; known are {', '.join(sorted(_KNOWN))}", field=name)
    if not isinstance(given.get("id"), str):
        raise InvalidRequest(f"id: must be a string, got {given.get('id')!r}", field="id")
    prompts = [name for name in _PROMPTS if name in given]
    if len(prompts) != 1:
        raise InvalidRequest(f"prompt: exactly one of {', '.join(_PROMPTS)} is needed, got {prompts or 'none'}")
    return Case(given["id"], _request(given, defaults))


def _request(given: dict[str, Any], defaults: GenerateRequest) -> GenerateRequest:
    try:
        sampling = {name: value for name, value in given.items() if name in _SAMPLING}
        if "logit_bias" in given:
            sampling["logit_bias"] = tuple((int(token), float(bias)) for token, bias in given["logit_bias"].items())
        rules = {name: value for name, value in given.items() if name in _STOP_RULES}
        if "stop_token_ids" in rules:
            rules["stop_token_ids"] = _integers("stop_token_ids", rules["stop_token_ids"])
        changes = {name: value for name, value in given.items() if name in _DIRECT}
        changes |= _prompt(given)
        if "stop" in given:
            changes["stop_strings"] = _strings("stop", given["stop"])
        return dataclasses.replace(
            defaults,
            sampling=dataclasses.replace(defaults.sampling, **sampling),
            stop=dataclasses.replace(defaults.stop, **rules),
            **_typed(changes),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"case {given['id']}: {error}") from error


def _typed(changes: dict[str, Any]) -> dict[str, Any]:
    for name in ("max_tokens", "seed", "n", "logprobs", "prompt_logprobs"):
        value = changes.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidRequest(f"{name}: must be an integer, got {value!r}", field=name)
    return changes


def _prompt(given: dict[str, Any]) -> dict[str, Any]:
    cleared: dict[str, Any] = {"text": None, "prompt_token_ids": None, "messages": None}
    if "text" in given:
        if not isinstance(given["text"], str):
            raise InvalidRequest(f"text: must be a string, got {given['text']!r}", field="text")
        return cleared | {"text": given["text"]}
    if "prompt_token_ids" in given:
        return cleared | {"prompt_token_ids": _integers("prompt_token_ids", given["prompt_token_ids"])}
    messages = given["messages"]
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages: must be a list, got {messages!r}", field="messages")
    entries = cast(list[Any], messages)
    return cleared | {"messages": tuple(_message(index, entry) for index, entry in enumerate(entries))}


def _message(index: int, entry: Any) -> ChatMessage:
    if not isinstance(entry, dict) or set(cast(dict[str, Any], entry)) != {"role", "content"}:
        raise InvalidRequest(f"messages[{index}]: must have exactly role and content, got {entry!r}", field="messages")
    fields = cast(dict[str, Any], entry)
    for name in ("role", "content"):
        if not isinstance(fields[name], str):
            raise InvalidRequest(f"messages[{index}].{name}: must be a string, got {fields[name]!r}", field="messages")
    return ChatMessage(fields["role"], fields["content"])


def _integers(name: str, values: Any) -> tuple[int, ...]:
    listed = cast(list[Any], values) if isinstance(values, list) else None
    if listed is None or any(isinstance(value, bool) or not isinstance(value, int) for value in listed):
        raise InvalidRequest(f"{name}: must be a list of integers", field=name)
    return tuple(listed)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        return (values,)
    listed: list[object] = cast(list[object], values) if isinstance(values, list) else [values]
    texts = tuple(value for value in listed if isinstance(value, str))
    if len(texts) != len(listed):
        raise InvalidRequest(f"{name}: must be a string or a list of strings, got {values!r}", field=name)
    return texts


def default_request(model: str, max_tokens: int | None, sampling: Sampling, seed: int | None) -> GenerateRequest:
    return GenerateRequest(model=model, sampling=sampling, seed=seed, stop=StopRules(), max_tokens=max_tokens)
