"""Workers of one host that offer and confirm at each other's doors, past every proxy: what happens when one goes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from baton.core.types import Role
from tests.faults.conftest import Bench
from tests.faults.deployment import Deployment, content
from tests.faults.proxy import Barrier, Content, Towards

by_local_calls = pytest.mark.parametrize("bench", ["local"], indirect=True)


@by_local_calls
def test_offers_pass_no_proxy(bench: Bench) -> None:
    """Else the tests below would show nothing."""

    async def act(found: Deployment) -> None:
        barrier = found.hold(Role.DECODE, Barrier(Towards.SERVER, Content.OFFER))
        [choice] = (await found.client.ask(bench.story())).choices
        assert choice.placement.prefill_worker != choice.placement.decode_worker
        assert not barrier.reached.done()

    bench.run(act)


@by_local_calls
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_goes_while_prompts_are_handed_over_costs_no_token(
    bench: Bench, role: Role, how: signal.Signals
) -> None:
    async def act(found: Deployment) -> None:
        requests = [bench.story() for _ in range(8)]
        asked = [asyncio.create_task(found.client.ask(request)) for request in requests]
        workers = [name for name, each in found.roles.items() if each is role]
        prefill = [name for name, each in found.roles.items() if each is Role.PREFILL]
        await found.fleet.until(lambda: any(found.proxies[name].prompts for name in prefill), "prompts are computed")
        found.signal(workers[0], how)
        answers = await asyncio.gather(*asked)
        await found.heal()
        for request, answer in zip(requests, answers, strict=True):
            assert content(answer) == content(await found.client.ask(request))

    bench.run(act)
