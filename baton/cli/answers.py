"""Answer lines: the JSON form of answers, put together from the chunks of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import BatonError
from baton.core.types import FinishReason, GenerateChunk, Placement, TokenLogprob, Usage
from baton.rpc.errors import status_code


@dataclass
class Answer:
    """One choice of one case, put together from its chunks; times in seconds on the caller's clock.

    Unlike a ``baton.client.Choice`` it has a case, times and an error: what a line says and a program's caller knows.
    """

    id: str
    index: int = 0
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list[TokenLogprob | None])
    placement: Placement = field(default_factory=Placement)
    migrations: int = 0
    limit: str = ""
    started: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    error: BatonError | None = None

    def add(self, chunk: GenerateChunk, now: float) -> None:
        self.request_id = chunk.request_id or self.request_id
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.finish = chunk.finish or self.finish
        self.limit = chunk.limit or self.limit
        self.usage = chunk.usage or self.usage
        self.placement = chunk.placement or self.placement
        self.migrations = max(self.migrations, chunk.migrations)
        if chunk.token_ids:
            self.token_ids += chunk.token_ids
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token is None else 1000 * (self.first_token - self.started)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first one."""
        if self.first_token is None or self.last_token is None or len(self.token_ids) < 2:
            return None
        return 1000 * (self.last_token - self.first_token) / (len(self.token_ids) - 1)

    def as_json(self) -> dict[str, object]:
        """The answer line, with the field names that tests and scripts rely on."""
        placement = self.placement
        line: dict[str, object] = {
            "id": self.id,
            "request_id": self.request_id,
            "index": self.index,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish.value if self.finish else None,
            "usage": dataclasses.asdict(self.usage),
            "logprobs": _logprobs(self.logprobs),
            "prefill": {"worker": placement.prefill_worker, "mode": placement.prefill_mode.value},
            "decode": {"worker": placement.decode_worker},
            "kv_bytes": placement.kv_bytes,
            "migrations": self.migrations,
            "ttft_ms": _rounded(self.ttft_ms),
            "tpot_ms": _rounded(self.tpot_ms),
            "error": _error(self.error),
        }
        if self.limit:
            line["limit"] = self.limit
        if self.prompt_logprobs:
            line["prompt_logprobs"] = _logprobs(self.prompt_logprobs)
        return line


def _logprobs(entries: Sequence[TokenLogprob | None]) -> list[object]:
    return [
        None
        if entry is None
        else {"token_id": entry.token_id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
        for entry in entries
    ]


def _error(error: BatonError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"code": status_code(error).name, "reason": error.reason, "message": error.message}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
