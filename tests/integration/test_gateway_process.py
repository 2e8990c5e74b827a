"""The gateway as its own process: what it loads, how it ends, and its death while it streams."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from baton.client import Client, GenerateChunk, ResumePolicy
from baton.client.answer import Answer, collect
from baton.core.types import FinishReason, GenerateRequest, Role, Sampling, StopRules
from tests.gateways import gateway_of, second_gateway
from tests.launched import running_stack

SLOW = "engine.fake_step_ms=10"
ASK = GenerateRequest(
    prompt_token_ids=tuple(range(10, 110)),
    max_tokens=120,
    sampling=Sampling(temperature=1.0, frequency_penalty=0.3),
    logprobs=1,
    stop=StopRules(ignore_eos=True),
    request_id="one",
    timeout=100,
)
LARGEST_MB = 200


async def replayed(chunks: list[GenerateChunk]) -> AsyncIterator[GenerateChunk]:
    for chunk in chunks:
        yield chunk


def test_gateway_and_planner_are_small_and_hold_no_torch() -> None:
    async def main() -> None:
        async with running_stack("fake") as running:
            await running.client.ask(ASK)
            for child in running.stack.children:
                if child.role in (Role.GATEWAY, Role.PLANNER):
                    proc = Path(f"/proc/{child.process.pid}")
                    resident = next(line for line in (proc / "status").read_text().splitlines() if "VmRSS" in line)
                    assert int(resident.split()[1]) / 1000 <= LARGEST_MB, child.id
                    assert "torch" not in (proc / "maps").read_text(), child.id

    asyncio.run(main())


def test_sigterm_lets_a_running_stream_end_and_the_process_exits_in_order() -> None:
    async def main() -> None:
        async with running_stack("fake", SLOW) as running:
            gateway = gateway_of(running)
            got: list[GenerateChunk] = []
            async with aclosing(running.client.stream(ASK)) as chunks:
                async for chunk in chunks:
                    got.append(chunk)
                    if len(got) == 3:
                        gateway.process.send_signal(signal.SIGTERM)
            answer = await collect(replayed(got), 1)
            assert answer.choices[0].finish is FinishReason.LENGTH
            assert len(answer.choices[0].token_ids) == ASK.max_tokens
            assert await asyncio.to_thread(gateway.process.wait, 60) == 0

    asyncio.run(main())


def test_a_client_hides_the_death_of_its_gateway() -> None:
    """The answer goes on through a second gateway, with the same ids, text and log-probabilities."""

    async def main() -> None:
        async with running_stack("fake", SLOW) as running:
            wanted = await running.client.ask(ASK)
            gateway = gateway_of(running)
            async with second_gateway(running) as other:
                addresses = [running.stack.record.gateway, other]
                patient = ResumePolicy(attempts=20, first_pause=0.05)
                async with Client(addresses, running.stack.record.key, resume=patient) as client:
                    got: list[GenerateChunk] = []
                    async with aclosing(client.stream(ASK)) as chunks:
                        async for chunk in chunks:
                            got.append(chunk)
                            if len(got) == 5:
                                gateway.process.kill()
                same(await collect(replayed(got), 1), wanted)
                await running.assert_idle()

    asyncio.run(main())


def same(mine: Answer, wanted: Answer) -> None:
    [one], [other] = mine.choices, wanted.choices
    assert (one.token_ids, one.logprobs, one.finish) == (other.token_ids, other.logprobs, other.finish)
    assert one.usage.completion_tokens == other.usage.completion_tokens
