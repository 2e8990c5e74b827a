"""The reference outputs in tests/data, as cases."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.types import ChatMessage, GenerateRequest

DATA = Path(__file__).parent / "data"
TINY = sorted(path for path in (DATA / "tiny").iterdir() if path.is_dir())
SMOLLM2_FEW = (
    *("chat-v01", "chat-v32", "one-token", "chinese"),  # log-probabilities, one token wanted, one given, another script
    *("multiturn-3", "prefix600-a"),  # an end by EOS, and a prompt of several chunks
)
"""Ids of the default model's cases that show what the others show again. All are compared over the split path."""


@dataclass(frozen=True)
class Golden:
    """One case. ``logprobs``: per output token (token id, logprob, the five likeliest), or empty."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    output: tuple[int, ...]
    finish: str
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]
    messages: tuple[ChatMessage, ...] | None
    text: str | None
    output_text: str

    def by_ids(self, logprobs: int | None = None) -> GenerateRequest:
        return GenerateRequest(prompt_token_ids=self.prompt, max_tokens=self.max_tokens, logprobs=logprobs, timeout=600)


def read_goldens(path: Path) -> list[Golden]:
    return [_golden(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _golden(line: dict[str, Any]) -> Golden:
    messages = line.get("messages")
    return Golden(
        id=line["id"],
        prompt=tuple(line["prompt_token_ids"]),
        max_tokens=line["max_tokens"],
        output=tuple(line["output_token_ids"]),
        finish=line["finish_reason"],
        logprobs=tuple(
            (entry["token_id"], entry["logprob"], tuple((t, p) for t, p in entry["top5"]))
            for entry in line.get("logprobs") or ()
        ),
        messages=None if messages is None else tuple(ChatMessage(m["role"], m["content"]) for m in messages),
        text=line.get("text"),
        output_text=line.get("output_text", ""),
    )
