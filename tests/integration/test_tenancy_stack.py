"""Tenants and quotas through real processes: each limit refuses, a revoked key ends, a deleted tenant drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.client import Client
from baton.core.errors import InvalidRequest, NotFound, PermissionDenied, QuotaExceeded, Unauthenticated
from baton.core.types import (
    AdminRole,
    GenerateRequest,
    KeyRecord,
    Limits,
    Metric,
    ModelLimits,
    Organisation,
    Paging,
    ResourceName,
    StopRules,
    Tenant,
    UsageGroup,
    UsageQuery,
)
from baton.rpc.admin_client import AdminClient
from baton.rpc.channels import ChannelPool, ClientSecurity
from tests.admin_world import NEW, ROOT, WHICHEVER
from tests.launched import GENEROUS_SECONDS, RunningStack, prompt_request, running_stack

UMBRELLA, ACME = ResourceName("umbrella"), ResourceName("umbrella", "acme")
ANY_KEY = KeyRecord("", "", "", "")
IGNORED_END = StopRules(ignore_eos=True)
OVER: dict[Metric, Limits] = {
    Metric.REQUESTS_PER_MINUTE: Limits(requests_per_minute=0),
    Metric.INPUT_TOKENS_PER_MINUTE: Limits(input_tokens_per_minute=7),
    Metric.OUTPUT_TOKENS_PER_MINUTE: Limits(output_tokens_per_minute=3),
    Metric.TOKENS_PER_MINUTE: Limits(tokens_per_minute=11),
    Metric.TOKENS_PER_DAY: Limits(tokens_per_day=11),
    Metric.TOKENS_PER_MONTH: Limits(tokens_per_month=11),
    Metric.CONCURRENCY: Limits(concurrency=0),
}


@dataclass
class Platform:
    stack: RunningStack
    admin: AdminClient
    channels: ChannelPool

    async def issue(self, tenant: ResourceName, **fields: object) -> str:
        record = replace(ANY_KEY, **fields)  # type: ignore[arg-type]
        return (await self.admin.issue_key(tenant, record, NEW)).secret

    @asynccontextmanager
    async def client(self, key: str) -> AsyncIterator[Client]:
        async with Client(self.stack.stack.record.gateway, key) as client:
            yield client

    @asynccontextmanager
    async def admin_as(self, key: str) -> AsyncIterator[AdminClient]:
        async with ChannelPool(ClientSecurity(token=key)) as channels:
            yield AdminClient(channels.get(self.stack.stack.record.gateway))


def on_platform(body: Callable[[Platform], Awaitable[None]], *flags: str) -> None:
    async def main() -> None:
        async with running_stack("fake", *flags, prefill=0) as stack:
            record = stack.stack.record
            async with ChannelPool(ClientSecurity(token=record.key)) as channels:
                platform = Platform(stack, AdminClient(channels.get(record.gateway)), channels)
                await platform.admin.create(UMBRELLA, Organisation(""), NEW)
                await platform.admin.create(ACME, Tenant("", ""), NEW)
                await body(platform)
            await stack.assert_idle()

    asyncio.run(main())


def asked(number: int = 0, max_tokens: int = 4) -> GenerateRequest:
    """8 tokens in."""
    return replace(prompt_request(range(number, number + 8), max_tokens), stop=IGNORED_END)


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(GENEROUS_SECONDS):
        while not await holds():
            await asyncio.sleep(0.02)
    assert what


async def refused(client: Client, metric: Metric, level: str) -> None:
    """Limits are seen within a moment of their change."""

    async def is_refused() -> bool:
        try:
            await client.ask(asked())
        except QuotaExceeded as error:
            return f": {metric}: limit" in error.message and error.message.startswith(level)
        return False

    await eventually(is_refused, f"{level} {metric}")


async def passes(client: Client) -> None:
    async def has_passed() -> bool:
        try:
            await client.ask(asked())
        except QuotaExceeded:
            return False
        return True

    await eventually(has_passed, "the request passes")


def test_each_limit_refuses_at_each_level_and_for_a_model() -> None:
    async def body(to: Platform) -> None:
        name = ACME.child("k1")
        key = (await to.admin.issue_key(name, ANY_KEY, NEW)).secret
        async with to.client(key) as client:
            await passes(client)
            for metric, limits in OVER.items():
                await to.admin.update(ACME, Tenant("", "", limits=limits), ["limits"], WHICHEVER)
                await refused(client, metric, "tenant 'acme'")
                await to.admin.update(ACME, Tenant("", ""), ["limits"], WHICHEVER)
                rules = (ModelLimits("fake", limits),)
                await to.admin.update(name, replace(ANY_KEY, model_limits=rules), ["model_limits"], WHICHEVER)
                await refused(client, metric, "key 'k1' for model 'fake'")
                await to.admin.update(name, ANY_KEY, ["model_limits"], WHICHEVER)
            daily = Organisation("", Limits(tokens_per_day=1))
            await to.admin.update(UMBRELLA, daily, ["limits"], WHICHEVER)
            await refused(client, Metric.TOKENS_PER_DAY, "organization 'umbrella'")
            await to.admin.update(UMBRELLA, Organisation(""), ["limits"], WHICHEVER)
            await passes(client)
            burst = Tenant("", "", limits=Limits(requests_per_minute=1000, burst=1))
            await to.admin.update(ACME, burst, ["limits"], WHICHEVER)
            await refused(client, Metric.BURST, "tenant 'acme'")

    on_platform(body)


def test_a_refusal_is_explained_by_its_request_id() -> None:
    async def body(to: Platform) -> None:
        await to.admin.update(ACME, Tenant("", "", limits=Limits(tokens_per_minute=11)), ["limits"], WHICHEVER)
        key = await to.issue(ACME, role=AdminRole.VIEWER)
        async with to.client(key) as client, to.admin_as(key) as viewer:
            with pytest.raises(QuotaExceeded) as caught:
                await client.ask(replace(asked(), request_id="why-me"))

            async def is_known() -> bool:
                try:
                    note = await viewer.explain(ROOT, "why-me")
                except NotFound:
                    return False
                [refusal] = note.refusals
                assert caught.value.refusals == (refusal,), "the client has the figures, too"
                assert str(refusal) == caught.value.message
                assert (refusal.limit, refusal.requested, refusal.retry_after) == (11, 12, None)
                return True

            await eventually(is_known, "the refusal is written")

    on_platform(body)


def test_a_revoked_key_is_refused_within_a_second_and_others_go_on() -> None:
    async def body(to: Platform) -> None:
        keys = [(await to.admin.issue_key(ACME.child(f"k{number}"), ANY_KEY, NEW)).secret for number in range(2)]
        async with to.client(keys[0]) as revoked, to.client(keys[1]) as other:
            await revoked.ask(asked())
            await to.admin.revoke_key(ACME.child("k0"), WHICHEVER)

            async def is_refused() -> bool:
                try:
                    await revoked.models()
                except Unauthenticated:
                    return True
                return False

            await eventually(is_refused, "the revoked key is refused")
            await other.ask(asked())

    on_platform(body)


def test_a_deleted_tenant_takes_no_new_requests_and_those_in_progress_end_and_are_charged() -> None:
    async def body(to: Platform) -> None:
        begun = time.time()
        key = await to.issue(ACME)
        async with to.client(key) as client:
            got = 0
            async with aclosing(client.stream(asked(max_tokens=1500))) as chunks:
                async for chunk in chunks:
                    if not got:
                        await to.admin.delete(ACME, WHICHEVER, force=True)

                        async def is_refused() -> bool:
                            try:
                                await client.models()
                            except Unauthenticated:
                                return True
                            return False

                        await eventually(is_refused, "new requests are refused")
                    got += len(chunk.token_ids)
            assert got == 1500

            async def is_charged() -> bool:
                query = UsageQuery(UMBRELLA, begun - 60, time.time() + 60)
                sums = await to.admin.sum_usage(query, UsageGroup.TENANT)
                return [(used.subject, used.input_tokens, used.output_tokens) for used in sums] == [("acme", 8, 1500)]

            await eventually(is_charged, "the answer is charged")

    on_platform(body)


def test_models_and_roles_bind_a_key() -> None:
    async def body(to: Platform) -> None:
        with pytest.raises(InvalidRequest, match="must be one of fake, got 'other'"):
            await to.issue(ACME, models=("other",))
        nothing = await to.issue(ACME, models=())
        async with to.client(nothing) as client:
            assert await client.models() == []
            with pytest.raises(PermissionDenied, match="may not use 'fake'"):
                await client.ask(replace(asked(), model="fake"))
        async with to.admin_as(nothing) as nobody:
            with pytest.raises(PermissionDenied):
                await nobody.list(ROOT, Paging())
        async with to.admin_as(await to.issue(ACME, role=AdminRole.TENANT_ADMIN)) as boss:
            await boss.update(ACME, Tenant("", "", limits=Limits(concurrency=5)), ["limits"], WHICHEVER)
            with pytest.raises(PermissionDenied):
                await boss.update(UMBRELLA, Organisation(""), ["limits"], WHICHEVER)

    on_platform(body)
