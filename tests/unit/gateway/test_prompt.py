from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.clock import SystemClock
from baton.core.errors import ChatTemplateMissing, InvalidRequest, TokenizerMissing
from baton.core.types import ChatMessage, GenerateRequest
from gateway.prompt import INLINE_CHARACTERS, ModelText, Prompts, load_model_text
from tests.unit.gateway.doubles import CARD, CONTEXT, MODEL, byte_tokenizer

HI = (ChatMessage("user", "hi"),)


def ids(prompts: Prompts, request: GenerateRequest) -> tuple[int, ...]:
    return asyncio.run(prompts.prompt_ids(request, CARD))


def test_token_ids_pass_as_they_are_even_without_a_tokenizer() -> None:
    assert ids(Prompts({}), GenerateRequest(prompt_token_ids=(1, 2))) == (1, 2)


def test_messages_need_a_chat_template_and_text_a_tokenizer() -> None:
    with pytest.raises(ChatTemplateMissing):
        ids(Prompts({MODEL: ModelText(byte_tokenizer())}), GenerateRequest(messages=HI))
    for request in (GenerateRequest(messages=HI), GenerateRequest(text="x")):
        with pytest.raises(TokenizerMissing):
            ids(Prompts({}), request)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    """Each token of this vocabulary is one byte, but for ``<end>``, which has five."""
    prompts = Prompts({MODEL: ModelText(byte_tokenizer())})
    with pytest.raises(InvalidRequest, match=f"context of {CONTEXT} tokens, got at least") as caught:
        ids(prompts, GenerateRequest(text="x" * (5 * CONTEXT + 1)))
    assert caught.value.field == "text"


def test_long_prompts_are_computed_off_the_event_loop_and_short_ones_on_it() -> None:
    threads: list[threading.Thread] = []

    def render(messages: Sequence[ChatMessage]) -> str:
        threads.append(threading.current_thread())
        return "x"

    prompts = Prompts({MODEL: ModelText(byte_tokenizer(), render)})
    ids(prompts, GenerateRequest(messages=HI))
    ids(prompts, GenerateRequest(messages=(ChatMessage("user", "x" * (INLINE_CHARACTERS + 1)),)))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_a_long_prompt_that_waits_for_its_turn_can_be_cancelled() -> None:
    held, started = threading.Event(), threading.Event()

    def render(messages: Sequence[ChatMessage]) -> str:
        started.set()
        held.wait(30)
        return "x"

    async def run() -> None:
        prompts = Prompts({MODEL: ModelText(byte_tokenizer(), render)}, threads=1)
        request = GenerateRequest(messages=(ChatMessage("user", "x" * (INLINE_CHARACTERS + 1)),))
        first = asyncio.create_task(prompts.prompt_ids(request, CARD))
        await asyncio.to_thread(started.wait, 30)
        second = asyncio.create_task(prompts.prompt_ids(request, CARD))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.set()
        assert len(await first) == 1

    asyncio.run(run())


def test_loads_a_models_text_side_with_its_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
                "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            }
        )
    )
    assert load_model_text(tmp_path, SystemClock()).render is None
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = load_model_text(tmp_path, SystemClock())
    assert text.render is not None
    assert text.render([replace(HI[0], content="ab")]) == "ab"
    with pytest.raises(TokenizerMissing):
        load_model_text(tmp_path / "none", SystemClock())
