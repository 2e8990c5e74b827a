"""What the benchmarks share: requests with distinct prompts through a gateway, timed, with a digest of all ids."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cli.answers import Answer
from baton.cli.ask import ask
from baton.cli.cases import Case
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.types import GenerateRequest, StopRules


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload: ``concurrent`` requests at once, ``prompt`` ids in, ``output`` ids out each."""

    name: str
    concurrent: int
    prompt: int
    output: int

    def tokens_per_second(self, seconds: float) -> float:
        """Output tokens a second; prompt tokens a second when a single token comes out."""
        counted = self.prompt if self.output == 1 else self.output
        return self.concurrent * counted / seconds


class Prompts:
    """Random ids from a seed; no two prompts share a first block, so that nothing is a prefix hit."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def draw(self, shape: Shape) -> list[list[int]]:
        low, high = 100, self._vocab_size - 1
        return [[self._random.randint(low, high) for _ in range(shape.prompt)] for _ in range(shape.concurrent)]


class Digest:
    """SHA-256 over all ids that came out, in the order of asking."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, ids: Sequence[int]) -> None:
        self._hash.update(b"".join(token.to_bytes(4, "little") for token in ids) + b";")

    def hex(self) -> str:
        return self._hash.hexdigest()


async def timed(
    client: Client, model: str, prompts: Sequence[Sequence[int]], output: int
) -> tuple[float, list[Answer]]:
    """Ask all prompts at once; (seconds until the last has ended, the answers). Raises what a request failed with."""
    clock = SystemClock()
    cases = [
        Case(
            f"bench-{index}",
            GenerateRequest(
                model=model,
                prompt_token_ids=tuple(ids),
                max_tokens=output,
                stop=StopRules(ignore_eos=True),
                timeout=600,
            ),
        )
        for index, ids in enumerate(prompts)
    ]
    started = clock.now()
    answers = [
        answer for listed in await asyncio.gather(*(ask(client, case, clock) for case in cases)) for answer in listed
    ]
    seconds = clock.now() - started
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        if answer.usage.cached_tokens or len(answer.token_ids) != output:
            raise RuntimeError(
                f"{answer.id}: {answer.usage} and {len(answer.token_ids)} ids, expected {output}, 0 cached"
            )
    return seconds, answers
