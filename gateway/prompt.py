"""From what a client sends (text, messages, ids) to prompt ids, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.clock import Clock
from baton.core.errors import ChatTemplateMissing, InvalidRequest, TokenizerMissing
from baton.core.types import ChatMessage, GenerateRequest, ModelCard
from baton.text import chat_template
from baton.text.text_stream import TextStream
from baton.text.tokenizer import Tokenizer, load_tokenizer

INLINE_CHARACTERS = 2048  # encoded within about 1 ms; a thread costs as much


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's text side. ``render`` turns a conversation into a prompt; None: the model has no chat template."""

    tokenizer: Tokenizer
    render: Callable[[Sequence[ChatMessage]], str] | None = None


def load_model_text(directory: Path, clock: Clock) -> ModelText:
    """The text side of a model directory. Raises TokenizerMissing when it has none, ModelError when it is broken."""
    tokenizer = load_tokenizer(directory)
    try:
        template = chat_template.load_chat_template(directory, clock)
    except ChatTemplateMissing:
        return ModelText(tokenizer)

    def render(messages: Sequence[ChatMessage]) -> str:
        return template.render([chat_template.ChatMessage(message.role, message.content) for message in messages])

    return ModelText(tokenizer, render)


class Prompts:
    """Computes prompt ids. At most ``threads`` long prompts at a time; the rest wait and can be cancelled there."""

    def __init__(self, models: Mapping[str, ModelText], *, threads: int = 2) -> None:
        self._models = models
        self._turns = asyncio.Semaphore(threads)

    def text_of(self, model: str) -> ModelText | None:
        return self._models.get(model)

    def text_stream(self, model: str, request: GenerateRequest) -> TextStream | None:
        """What makes text of a choice's ids; None for a model without a tokenizer."""
        text = self._models.get(model)
        if text is not None:
            return TextStream(text.tokenizer, request.stop_strings, min_tokens=request.stop.min_tokens)
        if request.stop_strings:
            raise TokenizerMissing(
                f"stop_strings: model {model} has no tokenizer; use stop_token_ids", field="stop_strings"
            )
        return None

    async def prompt_ids(self, request: GenerateRequest, card: ModelCard) -> tuple[int, ...]:
        """Raises TokenizerMissing or ChatTemplateMissing when the model has not what the form of prompt needs."""
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        text = self._models.get(card.model)
        if text is None:
            form = "messages" if request.messages is not None else "text"
            raise TokenizerMissing(f"{form}: model {card.model} has no tokenizer; send prompt_token_ids", field=form)
        if _characters(request) <= INLINE_CHARACTERS:
            return _encode(request, text, card)
        async with self._turns:
            return await asyncio.to_thread(_encode, request, text, card)


def _characters(request: GenerateRequest) -> int:
    return len(request.text or "") + sum(len(message.content) for message in request.messages or ())


def _encode(request: GenerateRequest, text: ModelText, card: ModelCard) -> tuple[int, ...]:
    if request.text is not None:
        _refuse_hopeless("text", request.text, text.tokenizer, card)
        return tuple(text.tokenizer.encode(request.text, add_special=True))
    if text.render is None:
        message = f"messages: model {card.model} has no chat template; send text or prompt_token_ids"
        raise ChatTemplateMissing(message, field="messages")
    prompt = text.render(request.messages or ())
    _refuse_hopeless("messages", prompt, text.tokenizer, card)
    return tuple(text.tokenizer.encode(prompt))


def _refuse_hopeless(field: str, prompt: str, tokenizer: Tokenizer, card: ModelCard) -> None:
    """Refuse a text that cannot fit the context even if each token were the longest, before encoding it."""
    fewest = tokenizer.fewest_tokens(len(prompt.encode("utf-8", "surrogatepass")))
    if fewest > card.context_length:
        limit = f"must fit the context of {card.context_length} tokens"
        raise InvalidRequest.out_of_range(field, f"at least {fewest} tokens", limit)
