"""A gateway with a ledger directory: each charge reaches the disk, and usage knows it when Redis has forgotten it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from baton.core.types import LedgerEntry, ResourceName, UsageQuery
from baton.rpc.admin_client import AdminClient
from baton.rpc.channels import ChannelPool, ClientSecurity
from baton.state.quota.ledger_files import LedgerFiles
from tests.launched import GENEROUS_SECONDS, RunningStack, prompt_request, running_stack


async def usage(stack: RunningStack) -> list[LedgerEntry]:
    record = stack.stack.record
    async with ChannelPool(ClientSecurity(token=record.key)) as channels:
        query = UsageQuery(ResourceName("local"), time.time() - 86_400, time.time() + 1, "")
        return [entry async for entry in AdminClient(channels.get(record.gateway)).export_usage(query)]


def test_what_is_charged_is_on_disk_and_survives_a_redis_that_comes_back_empty(tmp_path: Path) -> None:
    settings = (f"gateway.ledger_directory={tmp_path}", "gateway.ledger_archive_seconds=0.05")
    files = LedgerFiles(tmp_path)

    async def used_and_archived(stack: RunningStack, output: int) -> list[LedgerEntry]:
        """What is charged when a request of so many tokens was, and is on disk."""
        await stack.client.ask(prompt_request([1, 2, 3], output))
        async with asyncio.timeout(GENEROUS_SECONDS):
            while True:
                told, kept = await usage(stack), list(await files.entries("local"))
                if told == kept and told and told[-1].output_tokens == output:
                    return told
                await asyncio.sleep(0.02)

    async def body() -> None:
        async with running_stack("fake", *settings, prefill=0) as stack:
            first = await used_and_archived(stack, 5)
        async with running_stack("fake", *settings, prefill=0) as stack:
            assert (await usage(stack))[: len(first)] == first
            both = await used_and_archived(stack, 6)
            assert both[: len(first)] == first and len(both) > len(first)

    asyncio.run(body())
