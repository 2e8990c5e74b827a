"""Random requests for an engine, the same for a seed on every machine: lengths, draws, priorities, shared prefixes, and
clients that leave."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from baton.core.types import ModelCard, Sampling, StopRules, TokenRequest

PREFIXES = 8  # that half of the prompts begin with
STOP_IDS = 16  # of a request that has any
SHARED, REMOTE, LEAVING, RESUMING, HURRIED = 0.5, 0.2, 0.3, 0.5, 0.02
PATIENCE = 0.05  # seconds, mean, of clients that leave whatever the stage
HURRY = 0.5  # seconds, the longest time limit of a hurried request


class Computed(StrEnum):
    """Where the prompt is computed."""

    HERE = "here"
    APART = "apart"  # by a prefill whose blocks are then written to the reservation, as after a hand-over


@dataclass(frozen=True, slots=True)
class Departure:
    """A client that leaves early: after so many ``seconds``, wherever its request is then, or so many ``tokens``."""

    seconds: float | None = None
    tokens: int | None = None
    resumes: bool = False  # it comes back with the tokens it has


@dataclass(frozen=True, slots=True)
class Errand:
    """One request and how its client behaves. ``pause``: seconds before it."""

    request: TokenRequest
    computed: Computed
    departure: Departure | None
    pause: float


class LoadMix:
    """Draws errands one after the other, of up to ``longest`` tokens each, prompt and output: half of the lengths are
    uniform, half log-uniform."""

    def __init__(self, card: ModelCard, longest: int, seed: int, pause: float) -> None:
        """``pause`` is the mean in seconds of a client's pauses, a third of which are none."""
        self._card = card
        self._longest = longest
        self._pause = pause
        self._random = random.Random(seed)
        self._prefixes = [self._ids(max(1, longest // 2)) for _ in range(PREFIXES)]
        self._numbers = count(1)

    def errand(self) -> Errand:
        chance = self._random.random
        prompt = self._prompt()
        stop = self._stop(len(prompt))
        logprobs = self._random.choice((None, None, None, 0, 2))
        request = TokenRequest(
            f"load-{next(self._numbers)}",
            prompt,
            sampling=self._sampling(stop),
            stop=stop,
            logprobs=logprobs,
            prompt_logprobs=1 if chance() < 0.05 else None,
            priority=self._random.choice((0, 0, 0, 1, 2)),
            timeout=self._random.uniform(0.001, HURRY) if chance() < HURRIED else None,
        )
        pause = 0.0 if chance() < 1 / 3 else self._random.expovariate(1 / self._pause)
        computed = Computed.APART if chance() < REMOTE else Computed.HERE
        return Errand(request, computed, self._departure(stop.max_tokens), pause)

    def _prompt(self) -> tuple[int, ...]:
        length = self._length(self._longest * 3 // 4)
        if self._random.random() >= SHARED:
            return self._ids(length)
        prefix = self._random.choice(self._prefixes)
        shared = prefix[: self._random.randint(1, len(prefix))][:length]
        return shared + self._ids(length - len(shared))

    def _stop(self, prompt: int) -> StopRules:
        longest = max(1, self._longest - prompt)
        tokens = self._length(min(longest, max(1, self._longest // 2)))
        ids = self._ids(STOP_IDS) if self._random.random() < 0.3 else ()
        least = self._random.randint(0, tokens) if self._random.random() < 0.2 else 0
        return StopRules(tokens, least, ids, ignore_eos=self._random.random() < 0.5)

    def _sampling(self, stop: StopRules) -> Sampling:
        chosen = self._random.random()
        if chosen < 0.4:
            return Sampling()
        bias = tuple((token, 4.0) for token in sorted(set(stop.stop_token_ids))[:4])
        pick, uniform = self._random.choice, self._random.uniform
        is_penalised = chosen > 0.7
        return Sampling(
            temperature=pick((0.0, 0.5, 0.8, 1.0, 1.3)),
            top_k=pick((0, 0, 1, 20, 200)),
            top_p=pick((1.0, 0.95, 0.7)),
            min_p=pick((0.0, 0.0, 0.05)),
            repetition_penalty=uniform(1.0, 1.3) if is_penalised else 1.0,
            presence_penalty=uniform(-0.5, 0.5) if is_penalised else 0.0,
            frequency_penalty=uniform(-0.1, 0.5) if is_penalised else 0.0,
            logit_bias=bias,
            seed=self._random.getrandbits(63),
        )

    def _departure(self, max_tokens: int) -> Departure | None:
        if self._random.random() >= LEAVING:
            return None
        if self._random.random() < 0.4:
            return Departure(seconds=self._random.choice((0.0, self._random.expovariate(1 / PATIENCE))))
        resumes = self._random.random() < RESUMING
        return Departure(tokens=self._random.randint(0, max_tokens), resumes=resumes)

    def _length(self, high: int) -> int:
        if self._random.random() < 0.5:
            return self._random.randint(1, high)
        return min(high, int(math.exp(self._random.uniform(0.0, math.log(high + 1)))))

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self._card.vocab_size), k=length))
