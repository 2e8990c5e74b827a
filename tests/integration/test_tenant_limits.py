"""Each kind of limit, of a tenant and of its model, counts through the real gateway: so many pass, and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import count

import pytest

from baton.client import Client
from baton.core.errors import PermissionDenied, QuotaExceeded
from baton.core.types import Limits, Metric, ModelLimits, StopRules, Tenant
from tests.admin_world import WHICHEVER
from tests.gateways import eventually
from tests.launched import RunningStack, prompt_request, running_stack
from tests.tenants import UMBRELLA, Tenants, tenants_at

ASK = replace(prompt_request(range(8), 4), stop=StopRules(ignore_eos=True))  # 8 tokens in, 4 out
PASSING = 2  # requests, of these limits
LIMITS: dict[Metric, Limits] = {
    Metric.REQUESTS_PER_MINUTE: Limits(requests_per_minute=PASSING),
    Metric.INPUT_TOKENS_PER_MINUTE: Limits(input_tokens_per_minute=8 * PASSING + 7),
    Metric.OUTPUT_TOKENS_PER_MINUTE: Limits(output_tokens_per_minute=4 * PASSING + 3),
    Metric.TOKENS_PER_MINUTE: Limits(tokens_per_minute=12 * PASSING + 11),
    Metric.TOKENS_PER_DAY: Limits(tokens_per_day=12 * PASSING + 11),
    Metric.TOKENS_PER_MONTH: Limits(tokens_per_month=12 * PASSING + 11),
    Metric.BURST: Limits(requests_per_minute=PASSING + 1, burst=PASSING),  # the next one has room in twenty seconds
    Metric.CONCURRENCY: Limits(concurrency=PASSING),
}
NUMBERS = count(1)


@asynccontextmanager
async def limited(running: RunningStack, tenants: Tenants, record: Tenant, metric: Metric) -> AsyncIterator[Client]:
    """A client of a new tenant."""
    name = f"{metric}-{next(NUMBERS)}".replace("_", "-")
    key = await tenants.made(name, record.limits)
    if record.model_limits:
        await tenants.admin.update(UMBRELLA.child(name), record, ["model_limits"], WHICHEVER)
    async with Client(running.stack.record.gateway, key) as client:
        yield client


async def in_one_minute(running: RunningStack, tenants: Tenants, record: Tenant, metric: Metric) -> str:
    """The refusal that follows on ``PASSING`` answers; of another tenant if a minute or a day began meanwhile."""
    while True:
        began = time.time() // 60
        async with limited(running, tenants, record, metric) as client:
            for _ in range(PASSING):
                await client.ask(ASK)
            try:
                await client.ask(ASK)
            except QuotaExceeded as error:
                return error.message
        assert time.time() // 60 > began, f"{metric} let one through too many"


async def at_once(running: RunningStack, tenants: Tenants, record: Tenant) -> str:
    """The refusal while ``PASSING`` are in progress; a further one passes when one of them has ended."""
    slow = replace(ASK, max_tokens=1_500)
    async with limited(running, tenants, record, Metric.CONCURRENCY) as client:
        async with aclosing(client.stream(slow)) as one:
            await anext(one)
            async with aclosing(client.stream(slow)) as other:
                await anext(other)
                with pytest.raises(QuotaExceeded) as refused:
                    await client.ask(ASK)

            async def passes() -> bool:
                try:
                    await client.ask(ASK)
                except QuotaExceeded:
                    return False
                return True

            await eventually(passes, "there is room for one again")
        return refused.value.message


def test_every_limit_lets_through_what_it_says_and_refuses_the_next() -> None:
    async def main() -> None:
        async with running_stack("fake", "engine.fake_step_ms=2", prefill=0) as running, tenants_at(running) as tenants:
            for metric in Metric:
                limits = LIMITS[metric]
                for record, where in (
                    (Tenant("", "", limits=limits), "tenant '{}'"),
                    (Tenant("", "", model_limits=(ModelLimits("fake", limits),)), "tenant '{}' for model 'fake'"),
                ):
                    if metric is Metric.CONCURRENCY:
                        said = await at_once(running, tenants, record)
                    else:
                        said = await in_one_minute(running, tenants, record, metric)
                    name = said.split("'")[1]
                    assert said.startswith(f"{where.format(name)}: {metric}: limit "), said
            await running.assert_idle()

    asyncio.run(main())


def test_a_tenant_may_use_the_models_of_its_list_and_no_other() -> None:
    async def main() -> None:
        async with running_stack("fake", prefill=0) as running, tenants_at(running) as tenants:
            key = await tenants.made("acme", Limits())
            async with Client(running.stack.record.gateway, key) as client:
                await client.ask(ASK)
                await tenants.admin.update(UMBRELLA.child("acme"), Tenant("", "", models=()), ["models"], WHICHEVER)

                async def is_denied() -> bool:
                    try:
                        await client.ask(replace(ASK, model="fake"))
                    except PermissionDenied:
                        return True
                    return False

                await eventually(is_denied, "the model is not on the list any more")
                await tenants.admin.update(
                    UMBRELLA.child("acme"), Tenant("", "", models=("fake",)), ["models"], WHICHEVER
                )

                async def is_allowed() -> bool:
                    return not await is_denied()

                await eventually(is_allowed, "it is on the list again")

    asyncio.run(main())
