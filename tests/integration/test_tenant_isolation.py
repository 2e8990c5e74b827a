"""What one tenant can learn of another's prompts through the whole system: nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.client.answer import Choice, collect
from baton.core.streams import closing
from baton.core.types import (
    Account,
    GenerateRequest,
    KeyRecord,
    Organisation,
    Principal,
    Role,
    StopRules,
    Tenant,
    Tier,
    Usage,
)
from protos.baton.v1 import gateway_pb2
from services.planner.config import PlannerConfig
from tests.networks import DirectNetwork, NetworkFactory, WireNetwork
from tests.stack import PRINCIPAL, Stack

ZETA = Tenant("zeta", "zeta", Tier.GOLD)


def principal_of(tenant: Tenant) -> Principal:
    account = Account(Organisation(tenant.organisation), tenant, KeyRecord("tests", tenant.name, "", ""))
    return Principal(tenant.name, "tests", salt=b"salt of zeta", account=account)


OTHER = principal_of(ZETA)
PROMPT = tuple(range(10, 91))  # five blocks of 16 and a token
SECRETS = {"salt", "tenant", "tier", "priority", "tenant_max_blocks", "pool"}
both_networks = pytest.mark.parametrize("network", [DirectNetwork, WireNetwork])


async def ask(stack: Stack, principal: Principal) -> Choice:
    request = GenerateRequest(prompt_token_ids=PROMPT, max_tokens=6, seed=5, stop=StopRules(ignore_eos=True))
    async with asyncio.timeout(30), closing(stack.gateway.generate(request, principal)) as chunks:
        [choice] = (await collect(chunks, 1)).choices
    await stack.assert_idle()
    return choice


def work(stack: Stack) -> dict[str, tuple[int, int, int]]:
    return {
        name: (worker.stats.steps, worker.stats.prompt_tokens_computed, worker.stats.prompt_tokens_cached)
        for name, worker in stack.workers.items()
    }


async def answer_and_work(stack: Stack) -> tuple[list[int], Usage, dict[str, tuple[int, ...]]]:
    """What the tenant gets, and what that took."""
    before = work(stack)
    choice = await ask(stack, PRINCIPAL)
    spent = {
        name: tuple(b - a for a, b in zip(before[name], counts, strict=True)) for name, counts in work(stack).items()
    }
    return list(choice.token_ids), choice.usage, spent


@both_networks
@pytest.mark.parametrize("local", [0, 1000])
def test_an_answer_takes_the_same_work_whether_or_not_another_tenant_sent_the_prompt(
    network: NetworkFactory, local: int
) -> None:
    policy = PlannerConfig(local_prefill_max_tokens=local)

    async def run() -> None:
        async with Stack(network=network, policy=policy) as stack:
            alone = await answer_and_work(stack)
        async with Stack(network=network, policy=policy) as stack:
            await ask(stack, OTHER)
            after_another = await answer_and_work(stack)
            again = await answer_and_work(stack)
        assert after_another == alone
        assert alone[1].cached_tokens == 0
        assert again[2] != alone[2], "its own second time takes less"

    asyncio.run(run())


def test_no_client_can_name_a_salt_a_tenant_a_tier_or_a_priority() -> None:
    """The gateway's messages have no such field; what a client adds is unknown and goes no further."""
    for message in gateway_pb2.DESCRIPTOR.message_types_by_name.values():
        assert not SECRETS & {field.name for field in message.fields}, message.name


@both_networks
def test_a_tenants_requests_run_on_its_own_workers_only(network: NetworkFactory) -> None:
    async def run() -> None:
        policy = PlannerConfig(local_prefill_max_tokens=0, pools=("tenant:zeta=own",))
        async with Stack(network=network, policy=policy, prefill=2, decode=2, labels={"decode-1": ("own",)}) as stack:
            for _ in range(3):
                assert (await ask(stack, OTHER)).placement.decode_worker == "decode-1"
                assert (await ask(stack, PRINCIPAL)).placement.decode_worker == "decode-0"
            assert stack.workers["decode-1"].role is Role.DECODE

    asyncio.run(run())


def test_a_tier_reaches_the_engines_of_both_roles() -> None:
    async def run() -> None:
        async with Stack() as stack:
            seen: dict[str, set[tuple[str, Tier]]] = {}
            for name, worker in stack.workers.items():
                reserve, prefill = worker.engine.reserve, worker.engine.prefill

                def note(request, *rest, name=name, inner=reserve):
                    seen.setdefault(name, set()).add((request.tenant, request.tier))
                    return inner(request, *rest)

                def note_prefill(request, *rest, name=name, inner=prefill):
                    seen.setdefault(name, set()).add((request.tenant, request.tier))
                    return inner(request, *rest)

                worker.engine.reserve = note  # type: ignore[method-assign]
                worker.engine.prefill = note_prefill  # type: ignore[method-assign]
            await ask(stack, principal_of(replace(ZETA, tier=Tier.SILVER)))
        assert seen == {"decode-0": {("zeta", Tier.SILVER)}, "prefill-0": {("zeta", Tier.SILVER)}}

    asyncio.run(run())
