"""The shapes of ``baton bench offline``, driven through ``EngineApi``: the bare engine as a worker's front uses it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any, TypeVar

from baton.core.api import EngineApi
from baton.core.clock import Clock
from baton.core.errors import ConfigError
from baton.core.streams import closing
from baton.core.types import Sampling, StopRules, TokenChunk, TokenRequest
from bench.engine_watch import EngineWatch
from bench.metrics import Timeline
from bench.prompts import RandomPrompts
from bench.roofline import Lengths, ModelWork, Peak, Work
from bench.shapes import Batch, DecodeStep, FirstToken, Range, Repeat, Shape

T = TypeVar("T")
GREEDY = Sampling()
POLL_SECONDS = 0.001
HELD = 1000.0  # logit bias of the only tokens that an answer may have


@dataclass(frozen=True, slots=True)
class Roofline:
    """What measured times are compared with."""

    model: ModelWork
    peak: Peak


class EngineBench:
    """Measures shapes on one engine, one after the other. Every prompt is new to the engine."""

    def __init__(
        self,
        engine: EngineApi,
        prompts: RandomPrompts,
        clock: Clock,
        *,
        sampling: Sampling = GREEDY,
        roofline: Roofline | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._clock = clock
        self._sampling = sampling
        self._roofline = roofline
        self._numbers = count(1)

    async def warm_up(self) -> None:
        """A few short requests, not measured."""
        length = min(128, self._engine.card.context_length // 2)
        await self.measure(Batch("warm-up", 4, Range(length, length), Range(min(8, length), min(8, length))))

    async def measure(self, shape: Shape) -> dict[str, float]:
        """One repeat of ``shape``: its figures by name. Its prompts do not depend on what was measured before."""
        await self._idle()
        self._prompts.begin(shape.name)
        match shape:
            case Batch():
                return await self._measure_batch(shape)
            case DecodeStep():
                return await self._measure_step(shape)
            case FirstToken():
                return await self._measure_first_tokens(shape)
            case Repeat():
                return await self._measure_repeat(shape)

    # --- batches ------------------------------------------------------------------------------------------------------

    async def _measure_batch(self, shape: Batch) -> dict[str, float]:
        lengths = [
            Lengths(self._prompts.length(shape.prompt), self._prompts.length(shape.output))
            for _ in range(shape.requests)
        ]
        requests = [self._request(one.prompt, one.output) for one in lengths]
        watch = EngineWatch(self._engine, self._clock)
        timelines = await together(self._answer(request) for request in requests)
        figures = watch.figures()
        seconds = max(line.times[-1] for line in timelines) - min(line.sent for line in timelines)
        prompt_tokens, output_tokens = sum(one.prompt for one in lengths), sum(one.output for one in lengths)
        figures |= {
            "seconds": seconds,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "output_tokens_per_second": output_tokens / seconds,
            "prompt_tokens_per_second": prompt_tokens / seconds,
            "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        }
        if self._roofline is not None:
            figures |= self._fractions(self._roofline.model.requests(lengths, round(figures["steps"])), seconds)
        return figures

    async def _answer(self, request: TokenRequest) -> Timeline:
        """Run one request to its end. Raises when it is not the fresh computation that was to be measured."""
        timeline = Timeline(self._clock.now())
        async with self._decoding(request) as chunks:
            async for chunk in chunks:
                timeline.add(self._clock.now(), len(chunk.token_ids))
        if timeline.tokens != request.stop.max_tokens:
            wanted = request.stop.max_tokens
            raise RuntimeError(f"{request.request_id}: {timeline.tokens} tokens came, {wanted} were asked for")
        return timeline

    # --- decode steps -------------------------------------------------------------------------------------------------

    async def _measure_step(self, shape: DecodeStep) -> dict[str, float]:
        steady = SteadyState(shape, EngineWatch(self._engine, self._clock), self._clock)
        room = self._engine.card.context_length - shape.prompt
        requests = [self._request(shape.prompt, min(shape.max_tokens, room)) for _ in range(shape.requests)]
        streams = [asyncio.create_task(self._follow(request, steady, n)) for n, request in enumerate(requests)]
        closed = asyncio.create_task(steady.closed.wait())
        try:
            await asyncio.wait({closed, *streams}, return_when=asyncio.FIRST_COMPLETED)
            for stream in streams:
                if stream.done():
                    stream.result()
        finally:
            for task in (closed, *streams):
                task.cancel()
            await asyncio.gather(closed, *streams, return_exceptions=True)
        if not steady.closed.is_set():
            raise ConfigError(
                f"--shapes: {shape.name}: the engine must decode all {shape.requests} at once, but one ended before "
                f"the others began; raise engine.max_running, engine.max_step_tokens or the KV pool"
            )
        figures = steady.figures()
        if self._roofline is not None:
            work = self._roofline.model.decode_step(shape.requests, figures["mean_context"])
            figures |= self._fractions(work, figures["step_ms"] / 1000)
        return figures

    async def _follow(self, request: TokenRequest, steady: SteadyState, number: int) -> None:
        async with self._decoding(request) as chunks:
            async for chunk in chunks:
                steady.add(number, len(chunk.token_ids))
            steady.end()

    # --- first tokens -------------------------------------------------------------------------------------------------

    async def _measure_first_tokens(self, shape: FirstToken) -> dict[str, float]:
        times: list[float] = []
        watch = EngineWatch(self._engine, self._clock)
        for _ in range(shape.REQUESTS):
            request = self._request(shape.prompt, 1)
            await self._idle()
            await self._clock.sleep(shape.IDLE_SECONDS)
            timeline = await self._answer(request)
            times.append(timeline.times[0] - timeline.sent)
        typical = statistics.median(times)
        figures = {"ttft_ms": 1000 * typical, "ttft_first_ms": 1000 * times[0]}
        figures |= {"ttft_min_ms": 1000 * min(times), "ttft_max_ms": 1000 * max(times)}
        figures |= {name: value for name, value in watch.figures().items() if name.endswith("_per_step")}
        if self._roofline is not None:
            figures |= self._fractions(self._roofline.model.requests([Lengths(shape.prompt, 1)], 1), typical)
        return figures

    # --- speculation --------------------------------------------------------------------------------------------------

    async def _measure_repeat(self, shape: Repeat) -> dict[str, float]:
        """The same requests without drafts and with them, from first tokens to last ones.

        ``same_tokens`` is the share of the answers before the first token that differs, which only rounding can bring
        about: rows of other batch sizes may be computed in another order.
        """
        patterns = [self._prompts.ids(min(shape.PATTERN, shape.prompt)) for _ in range(shape.requests)]
        plain, plain_answers = await self._repeat(shape, patterns, speculation=False)
        before = self._engine.stats
        drafted, answers = await self._repeat(shape, patterns, speculation=True)
        after = self._engine.stats
        proposed = after.draft_tokens_proposed - before.draft_tokens_proposed
        if not proposed:
            raise ConfigError(f"--shapes: {shape.name}: the engine must speculate, set engine.speculation")
        same = [_common_prefix(one, other) for one, other in zip(plain_answers, answers, strict=True)]
        return {
            "speedup": plain / drafted,
            "tpot_ms": 1000 * drafted,
            "plain_tpot_ms": 1000 * plain,
            "output_tokens_per_second": shape.requests / drafted,
            "plain_output_tokens_per_second": shape.requests / plain,
            "draft_acceptance": (after.draft_tokens_accepted - before.draft_tokens_accepted) / proposed,
            "tokens_per_step": shape.requests * shape.output / (after.steps - before.steps),
            "same_tokens": sum(same) / (shape.requests * shape.output),
        }

    async def _repeat(
        self, shape: Repeat, patterns: Sequence[tuple[int, ...]], *, speculation: bool
    ) -> tuple[float, list[list[int]]]:
        """Seconds a token, the mean over the requests, and the answers."""
        await self._idle()
        results = await together(
            self._tokens(
                replace(
                    self._request(shape.prompt, shape.output),
                    prompt=(pattern * shape.prompt)[: shape.prompt],
                    sampling=replace(self._sampling, logit_bias=tuple((token, HELD) for token in sorted({*pattern}))),
                    salt=f"{next(self._numbers)}".encode(),
                    speculation=speculation,
                )
            )
            for pattern in patterns
        )
        await self._idle()
        return statistics.fmean(line.tpot or 0.0 for line, _ in results), [answer for _, answer in results]

    async def _tokens(self, request: TokenRequest) -> tuple[Timeline, list[int]]:
        timeline, answer = Timeline(self._clock.now()), list[int]()
        async with self._decoding(request) as chunks:
            async for chunk in chunks:
                timeline.add(self._clock.now(), len(chunk.token_ids))
                answer += chunk.token_ids
        return timeline, answer

    # --- inside -------------------------------------------------------------------------------------------------------

    def _request(self, prompt: int, output: int) -> TokenRequest:
        return TokenRequest(
            f"bench-{next(self._numbers)}",
            self._prompts.ids(prompt),
            sampling=self._sampling,
            stop=StopRules(max_tokens=output, ignore_eos=True),
        )

    @asynccontextmanager
    async def _decoding(self, request: TokenRequest) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        # As a decode worker asks for a prompt that it computes itself: the engine begins without another word.
        async with self._engine.reserve(request, compute_up_to=len(request.prompt)) as reservation:
            if reservation.cached_tokens:
                raise RuntimeError(f"{request.request_id}: {reservation.cached_tokens} tokens were cached, expected 0")
            async with closing(reservation.decode(None)) as chunks:
                yield chunks

    async def _idle(self) -> None:
        """Wait until the engine holds nothing of what was measured before."""
        while self._engine.stats.running or self._engine.stats.waiting:
            await self._clock.sleep(POLL_SECONDS)

    def _fractions(self, work: Work, seconds: float) -> dict[str, float]:
        assert self._roofline is not None
        return work.fractions(seconds, self._roofline.peak)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    return next(differing, len(one))


class SteadyState:
    """The stretch in which all streams of a ``DecodeStep`` decode, one token a step each."""

    def __init__(self, shape: DecodeStep, watch: EngineWatch, clock: Clock) -> None:
        self._shape = shape
        self._watch = watch
        self._clock = clock
        self._streams = [Timeline(0.0) for _ in range(shape.requests)]
        self._totals = [0] * shape.requests
        self._waiting = shape.requests  # streams without a token
        self._is_missed = False  # a stream has ended before all had begun
        self._begins = [0] * shape.requests  # by stream: chunks before the stretch
        self._contexts = [0] * shape.requests  # by stream: output tokens before it
        self._engine_figures: dict[str, float] = {}
        self.closed = asyncio.Event()

    def add(self, number: int, tokens: int) -> None:
        """``tokens`` of stream ``number`` have come."""
        if not tokens or self._is_missed or self.closed.is_set():
            return
        stream = self._streams[number]
        self._waiting -= not stream.times
        stream.add(self._clock.now(), tokens)
        self._totals[number] += tokens
        if self._waiting:
            return
        if not any(self._begins):
            self._open()
        measured = len(stream.times) - self._begins[number]
        if self._totals[number] >= self._shape.output and measured >= self._shape.MIN_STEPS:
            self._engine_figures = self._watch.figures()
            self.closed.set()

    def end(self) -> None:
        """A stream has come to its end."""
        self._is_missed = self._is_missed or self._waiting > 0

    def _open(self) -> None:
        self._begins = [len(stream.times) for stream in self._streams]
        self._contexts = list(self._totals)
        self._watch.start()

    def figures(self) -> dict[str, float]:
        """``step_ms`` is the median gap between a stream's chunks, over all streams; ``mean_step_ms`` the mean.

        A step that brings a stream several tokens counts once. The engine's own ``steps`` may run ahead of what has
        come here, where steps are quicker than this process takes them in.
        """
        stretches = [stream.times[first:] for stream, first in zip(self._streams, self._begins, strict=True)]
        gaps = [later - earlier for times in stretches for earlier, later in pairwise(times)]
        tokens = sum(self._totals) - sum(self._contexts)
        middle = statistics.fmean((a + b) / 2 for a, b in zip(self._contexts, self._totals, strict=True))
        return self._engine_figures | {
            "step_ms": 1000 * statistics.median(gaps),
            "mean_step_ms": 1000 * statistics.fmean(gaps),
            "gaps": len(gaps),
            "mean_context": self._shape.prompt + middle,
            "output_tokens_per_second": tokens / self._engine_figures["seconds"],
        }


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure ends the others and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
