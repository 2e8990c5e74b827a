"""Real engines over the tiny models, in float32, and what one of them answers alone: the truth to compare with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from baton.core.types import Sampling, StopRules, TokenChunk, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.load import build_runner
from baton.engine.runner import Part, Runner, StepResult
from tests.answers import Answer
from tests.goldens import DATA, TINY
from tests.runner_around import RunnerAround
from tests.unit.engine.core_driver import CoreDriver

ALL = tuple(path.name for path in TINY)
UNLIKE = ("llama-gqa-tied", "mistral-window", "mixtral", "qwen3-moe")  # what differs most: plain, windowed, sparse
VOCABULARY = 384
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, seed=11),
    Sampling(temperature=1.0, top_p=0.9, seed=12),
    Sampling(temperature=0.9, top_k=40, min_p=0.02, repetition_penalty=1.3, seed=13),
    Sampling(temperature=0.8, frequency_penalty=0.4, presence_penalty=0.2, seed=14),
    Sampling(logit_bias=((5, 1.5), (77, -100.0)), repetition_penalty=1.1),
    Sampling(temperature=1.2, top_p=0.95, logit_bias=((9, 2.0),), frequency_penalty=-0.1, seed=2**63 - 1),
)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Ids that differ between salts from the first one on."""
    return tuple((i * i + 31 * i + 97 * salt) % VOCABULARY for i in range(length))


def request(ids: Iterable[int], max_tokens: int = 8, **fields: Any) -> TokenRequest:
    fields.setdefault("stop", StopRules(max_tokens=max_tokens, ignore_eos=True))
    return TokenRequest(fields.pop("request_id", "r"), tuple(ids), **fields)


def varied(index: int, max_tokens: int, **fields: Any) -> TokenRequest:
    """One of many requests that are unlike each other in length and in how they draw; some must not stop early."""
    stop = StopRules(max_tokens=max_tokens, min_tokens=index % 4, stop_token_ids=tuple(range(8 * (index % 5))))
    fields.setdefault("sampling", SAMPLINGS[index % len(SAMPLINGS)])
    ids = fields.pop("prompt", prompt(1 + 23 * index % 97, index))
    return request(ids, stop=stop, request_id=f"r{index}", **fields)


def real_config(name: str, **changes: Any) -> EngineConfig:
    model = EngineConfig(str(DATA / "tiny" / name), served_name=name, dtype="float32", backend="native", threads=1)
    return replace(model, **{"kv_blocks": 128, "block_size": 16, **changes})


def real_driver(config: EngineConfig) -> CoreDriver:
    return CoreDriver(build_runner(config), config)


def alone(name: str, wanted: TokenRequest, **changes: Any) -> Answer:
    """What an engine that has seen nothing else answers, the whole prompt in one step."""
    return _alone(real_config(name, max_step_tokens=1024, **changes), wanted)


@lru_cache(maxsize=4096)
def _alone(config: EngineConfig, wanted: TokenRequest) -> Answer:
    return together(CoreDriver(_runner(config), config).answer(wanted).chunks)


@cache
def _runner(config: EngineConfig) -> Runner:
    return build_runner(config)


def together(chunks: Iterable[TokenChunk]) -> Answer:
    whole = Answer()
    for chunk in chunks:
        whole = whole.plus(chunk)
    return whole


class GatedRunner(RunnerAround):
    """A runner that calls ``on_step`` before each step, as the fake one does."""

    def __init__(self, inner: Runner, on_step: Callable[[Sequence[Part]], None]) -> None:
        super().__init__(inner)
        self._on_step = on_step

    def launch(self, parts: Sequence[Part]) -> None:
        self._on_step(parts)
        super().launch(parts)


class AheadRunner(RunnerAround):
    """Makes a runner on the CPU one that is a step ahead: it computes each step when it is collected."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._flights: deque[list[Part]] = deque()
        self._drawn: dict[int, int | None] = {}

    @property
    def steps_ahead(self) -> int:
        return 1

    def launch(self, parts: Sequence[Part]) -> None:
        copies = [part._replace(context=part.context[: part.end], blocks=list(part.blocks)) for part in parts]
        self._flights.append(copies)

    def collect(self) -> StepResult:
        parts = [self._resolved(part) for part in self._flights.popleft()]
        super().launch(parts)
        result = super().collect()
        self._drawn = {part.key: token for part, token in zip(parts, result.token_ids, strict=True)}
        return result

    def _resolved(self, part: Part) -> Part:
        if len(part.context) == part.end:
            return part
        token = self._drawn[part.key]
        return part._replace(context=[*part.context, 0 if token is None else token])  # 0: the draw has failed


def gated(config: EngineConfig, on_step: Callable[[Sequence[Part]], None]) -> Runner:
    """For ``Stack.runner``."""
    return GatedRunner(build_runner(config), on_step)
