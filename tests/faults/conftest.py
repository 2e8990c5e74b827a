"""One deployment for all tests of a module, in an event loop that outlives each of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.core.types import GenerateRequest, Sampling, StopRules
from tests.faults.deployment import Deployment, deployment

GENEROUS_SECONDS = 90.0

Act = Callable[[Deployment], Coroutine[Any, Any, None]]


@dataclass
class Bench:
    """Runs tests on a deployment. Afterwards everything is mended, and the invariants hold."""

    runner: asyncio.Runner
    found: Deployment
    stories: int = 0

    def run(self, act: Act) -> None:
        async def whole() -> None:
            async with asyncio.timeout(2 * GENEROUS_SECONDS):
                try:
                    await act(self.found)
                finally:
                    await self.found.heal()
                await self.found.assert_sound()

        self.runner.run(whole())

    def story(self, **changes: Any) -> GenerateRequest:
        """Sampled, with penalties and log-probabilities; its prompt is found in no cache."""
        self.stories += 1
        draw = random.Random(self.stories)
        request = GenerateRequest(
            prompt_token_ids=tuple(draw.randrange(130, 500) for _ in range(190)),
            max_tokens=40,
            sampling=Sampling(temperature=0.9, frequency_penalty=0.3),
            seed=self.stories,
            logprobs=1,
            stop=StopRules(ignore_eos=True),
            timeout=GENEROUS_SECONDS,
        )
        return replace(request, **changes)


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Parameter: ``shm``, which workers of one host take by themselves, ``tcp``, which is then the only one, or
    ``local``: by shm, with offers past the proxies."""
    only = {"shm": (), "tcp": ("kvtransfer.transports=tcp",), "local": ("kvtransfer.local_calls=true",)}[request.param]
    context = deployment(tmp_path_factory.mktemp("deployment"), "engine.fake_step_ms=2", *only)
    with asyncio.Runner() as runner:
        found = runner.run(context.__aenter__())
        try:
            yield Bench(runner, found)
        finally:
            runner.run(context.__aexit__(None, None, None))
