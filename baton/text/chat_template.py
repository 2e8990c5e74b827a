"""Renders a conversation into a prompt with the Jinja template that comes with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import jinja2

from baton.core.clock import Clock
from baton.core.errors import ChatTemplateMissing, InvalidRequest, ModelError
from baton.text.model_files import read_json, special_token_texts
from baton.text.template_sandbox import Budget, ChatEnvironment, TemplateRefusal, render

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_STEPS = 100_000
MAX_CHARACTERS = 16 * 2**20

# What a template's expressions can raise on messages that it was not written for.
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. ``role`` is one of ``ROLES``; only a user's ``content`` must not be empty."""

    role: str
    content: str


def parse_messages(value: object, field: str = "messages") -> tuple[ChatMessage, ...]:
    """Read messages from decoded JSON: a list of objects with ``role`` and ``content``.

    Raises InvalidRequest naming the place, say ``messages[2].role``.
    """
    if not isinstance(value, list):
        raise InvalidRequest.out_of_range(field, _type_name(value), "must be a list of messages")
    entries = cast("list[object]", value)
    return tuple(_parse_message(entry, f"{field}[{index}]") for index, entry in enumerate(entries))


def _parse_message(value: object, field: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise InvalidRequest.out_of_range(field, _type_name(value), "must be an object with role and content")
    entry = cast("Mapping[str, object]", value)
    for key in ("role", "content"):
        if not isinstance(entry.get(key), str):
            got = _type_name(entry[key]) if key in entry else "nothing"
            raise InvalidRequest.out_of_range(f"{field}.{key}", got, "must be a string")
    for key in entry:
        if key not in {"role", "content"}:
            raise InvalidRequest(f"{field}.{key}: unknown field", field=f"{field}.{key}")
    return ChatMessage(role=cast("str", entry["role"]), content=cast("str", entry["content"]))


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest, naming the place, for no messages, an unknown role, or a user who says nothing."""
    if not messages:
        raise InvalidRequest.out_of_range("messages", "none", "must hold at least one message")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            limit = f"must be one of {', '.join(ROLES)}"
            raise InvalidRequest.out_of_range(f"messages[{index}].role", repr(message.role[:64]), limit)
        if message.role == "user" and not message.content:
            raise InvalidRequest.out_of_range(f"messages[{index}].content", "nothing", "must not be empty")


class ChatTemplate:
    """A compiled chat template; made by ``load_chat_template``. Safe to use from several threads.

    ``special_tokens`` are the variables ``bos_token``, ``eos_token`` and so on. ``strftime_now`` gives the template
    the date in UTC, so that all gateways render the same prompt.
    """

    def __init__(
        self,
        source: str,
        clock: Clock,
        *,
        special_tokens: Mapping[str, str],
        max_steps: int = MAX_STEPS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        def strftime_now(pattern: str) -> str:
            return datetime.fromtimestamp(clock.wall(), UTC).strftime(pattern)

        try:
            self._template = ChatEnvironment(strftime_now).compile_metered(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"chat_template: does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._max_steps = max_steps
        self._max_characters = max_characters

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt, special tokens spelled out: encode it without ``add_special``.

        ``variables`` are further ones that the model's template knows, such as ``tools`` or ``enable_thinking``.
        Raises InvalidRequest as ``check_messages``, and naming ``messages`` when the template refuses or cannot take
        them, or renders beyond the limits.
        """
        check_messages(messages)
        own: dict[str, object] = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        own["messages"] = [asdict(message) for message in messages]
        taken = own.keys() & (variables or {}).keys()
        if taken:
            raise InvalidRequest(f"variables.{min(taken)}: is set by the template's caller", field="variables")
        try:
            return render(self._template, {**(variables or {}), **own}, Budget(self._max_steps, self._max_characters))
        except TemplateRefusal as error:
            raise InvalidRequest(f"messages: the model's chat template says: {error}", field="messages") from error
        except _FAULTS as error:
            message = f"messages: the model's chat template cannot take them: {type(error).__name__}: {error}"
            raise InvalidRequest(message, field="messages") from error


def load_chat_template(directory: Path, clock: Clock) -> ChatTemplate:
    """Load the chat template of a model directory: chat_template.jinja, else ``chat_template`` of
    tokenizer_config.json (of several, the one named "default").

    Raises ChatTemplateMissing when there is none, ModelError when it cannot be read or compiled.
    """
    source = _template_source(directory)
    if source is None:
        raise ChatTemplateMissing(
            f"model {directory.name}: has no chat template; send text or prompt_token_ids", field="messages"
        )
    texts = special_token_texts(directory)
    return ChatTemplate(source, clock, special_tokens=texts)


def _template_source(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    path = directory / "tokenizer_config.json"
    value = read_json(path).get("chat_template")
    if value is None or isinstance(value, str):
        return value
    for entry in cast("list[object]", value) if isinstance(value, list) else []:
        match entry:
            case {"name": "default", "template": str(source)}:
                return source
            case _:
                pass
    raise ModelError(f"{path}: chat_template: expected a template or a list with one named default")


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
