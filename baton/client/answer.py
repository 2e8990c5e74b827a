"""A whole answer, put together from its chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.core.types import FinishReason, GenerateChunk, Placement, TokenLogprob, Usage


@dataclass(slots=True)
class Choice:
    """What one choice says, without times. ``prompt_logprobs``, when asked for, come with choice 0."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    placement: Placement = field(default_factory=Placement)
    migrations: int = 0
    limit: str = ""  # of the service, that ended the answer before the request's own did

    def add(self, chunk: GenerateChunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.finish = chunk.finish or self.finish
        self.limit = chunk.limit or self.limit
        self.usage = chunk.usage or self.usage
        self.placement = chunk.placement or self.placement
        self.migrations = max(self.migrations, chunk.migrations)


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self.choices[0].text


async def collect(chunks: AsyncIterator[GenerateChunk], n: int) -> Answer:
    """Read a stream of ``n`` choices to its end."""
    choices = tuple(Choice() for _ in range(n))
    request_id = ""
    async for chunk in chunks:
        request_id = chunk.request_id
        choices[chunk.index].add(chunk)
    return Answer(request_id, choices)
