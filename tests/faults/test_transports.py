"""What becomes of a hand-over, and of what it had mapped, when a transport fails or a worker dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import TransportUnavailable
from baton.core.streams import closing
from baton.core.types import DecodeRequest, KvChunk, PrefillMode, ProcessRecord, Role, StopRules, TokenRequest
from baton.rpc.decode_link import DecodeLink
from services.kvtransfer.config import KvTransferConfig
from tests.answers import Answer
from tests.networks import NetworkFactory
from tests.processes import Fleet, candidate, children, fleet
from tests.stack import Stack, tokens

PAIR = [(Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0")]


# --- in one process ---------------------------------------------------------------------------------------------------


def test_a_refused_transport_is_replaced_within_the_same_attempt(
    network: NetworkFactory, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tokens(200, seed=5, logprobs=2)

    async def run() -> None:
        async with Stack(network=network) as stack:
            offers = stack.workers["decode-0"].offers

            def refuse(chunk: KvChunk) -> KvChunk:
                if chunk.source is not None:
                    raise TransportUnavailable("shared memory is broken")
                return chunk

            offers.on_offer = refuse
            answer = await stack.generate(wanted)
            assert answer.content == (await stack.alone(wanted)).content
            assert answer.placement is not None
            assert answer.placement.prefill_mode is PrefillMode.REMOTE
            assert {chunk.ticket.attempt.retry for chunk in offers.offers} == {1}
            assert {chunk.source is None for chunk in offers.offers} == {True, False}
            offers.offers.clear()
            await stack.generate(replace(wanted, request_id="next", salt=b"next"))
            assert {chunk.source for chunk in offers.offers} == {None}, "it is left alone for a while"
            await stack.assert_idle()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [record.message for record in caplog.records].count("transport fallback") == 1


@pytest.mark.parametrize("transports", [("tcp",), ("shm",), ("shm", "tcp")])
def test_kv_takes_the_way_that_the_configuration_allows(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Stack, "transports", transports)
    wanted = tokens(200, seed=5)

    async def run() -> None:
        async with Stack(network=network) as stack:
            answer = await stack.generate(wanted)
            assert answer.content == (await stack.alone(wanted)).content
            offered = stack.workers["decode-0"].offers.offers
            assert len(offered) > 1
            assert {chunk.source is not None for chunk in offered} == {"shm" in transports}
            assert {bool(chunk.body) for chunk in offered} == {"shm" not in transports}
            await stack.assert_idle()

    asyncio.run(run())


def test_checksums_off_takes_the_sender_s_word_on_both_ways(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens(200, seed=5)

    async def run() -> None:
        for transports in (("shm",), ("tcp",)):
            monkeypatch.setattr(Stack, "transports", transports)
            async with Stack(network=network, kvtransfer=KvTransferConfig(checksums="off")) as stack:
                answer = await stack.generate(wanted)
                assert answer.content == (await stack.alone(wanted)).content
                assert {chunk.checksums for chunk in stack.workers["decode-0"].offers.offers} == {()}
                await stack.assert_idle()

    asyncio.run(run())


# --- over processes ---------------------------------------------------------------------------------------------------


def mapped_pools(record: ProcessRecord) -> int:
    """Mappings of pools in the worker's two processes, those of its own among them."""
    maps = (Path(f"/proc/{pid}/maps") for pid in (record.pid, *children(record.pid)))
    return sum(each.read_text(encoding="utf-8").count("memfd:baton-kv") for each in maps)


async def ask(found: Fleet, records: dict[str, ProcessRecord], request_id: str) -> Answer:
    """200 tokens whose prompt no cache knows, through a prefill worker."""
    asked = TokenRequest(
        request_id, tuple(range(3, 203)), salt=request_id.encode(), stop=StopRules(max_tokens=10, ignore_eos=True)
    )
    prefill = tuple(candidate(record) for record in records.values() if record.role is Role.PREFILL)
    decode = DecodeLink(candidate(records["decode-0"]), gateway_id="tests", security=found.security)
    whole = Answer()
    async with decode, closing(decode.generate(DecodeRequest(asked, prefill))) as chunks:
        async for chunk in chunks:
            whole = whole.plus(chunk)
    assert whole.placement is not None
    assert whole.placement.prefill_mode is PrefillMode.REMOTE
    return whole


async def received(record: ProcessRecord, transport: str) -> float:
    """KV bytes that came to the worker by ``transport``."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{record.http_address}/metrics", timeout=10) as response:
            return response.read().decode()

    name = f'baton_kv_received_bytes_total{{transport="{transport}"}}'
    lines = (await asyncio.to_thread(read)).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def run_fleet(tmp_path: Path, scenario: Callable[[Fleet], Awaitable[None]]) -> None:
    async def run() -> None:
        async with fleet(tmp_path, PAIR) as found:
            await scenario(found)

    asyncio.run(run())


def test_a_killed_senders_pool_is_unmapped_and_its_successor_is_mapped_again(tmp_path: Path) -> None:
    async def scenario(found: Fleet) -> None:
        records = await found.ready("prefill-0", "decode-0")
        alone = mapped_pools(records["decode-0"])
        first = await ask(found, records, "a")
        assert mapped_pools(records["decode-0"]) == alone + 1
        found.signal("prefill-0", signal.SIGKILL)
        await found.until(lambda: mapped_pools(records["decode-0"]) == alone, "the dead sender's pool is unmapped")
        await found.ended("prefill-0")
        found.start(Role.PREFILL, "prefill-0")

        async def is_back() -> bool:
            return (await found.ready("prefill-0"))["prefill-0"].epoch != records["prefill-0"].epoch

        await found.until(is_back, "another life of the prefill worker")
        records = await found.ready("prefill-0", "decode-0")
        second = await ask(found, records, "b")
        assert second.token_ids == first.token_ids
        assert mapped_pools(records["decode-0"]) == alone + 1
        assert await received(records["decode-0"], "shm") == 2 * 200 * 16
        assert await received(records["decode-0"], "tcp") == 0

    run_fleet(tmp_path, scenario)


def test_a_killed_receiver_leaves_its_sender_whole(tmp_path: Path) -> None:
    async def scenario(found: Fleet) -> None:
        records = await found.ready("prefill-0", "decode-0")
        first = await ask(found, records, "a")
        found.signal("decode-0", signal.SIGKILL)
        await found.ended("decode-0")
        found.start(Role.DECODE, "decode-0")

        async def is_back() -> bool:
            return (await found.ready("decode-0"))["decode-0"].epoch != records["decode-0"].epoch

        await found.until(is_back, "another life of the decode worker")
        records = await found.ready("prefill-0", "decode-0")
        assert (await ask(found, records, "b")).token_ids == first.token_ids
        assert await received(records["decode-0"], "shm") == 200 * 16

        async def idle() -> bool:
            stats = [record.stats for record in (await found.records()).values()]
            return len(stats) == 2 and all(each.held_blocks == 0 for each in stats)

        await found.until(idle, "both workers hold nothing")

    run_fleet(tmp_path, scenario)


def test_workers_that_have_only_bytes_in_common_use_them_without_a_fallback(tmp_path: Path) -> None:
    """As a worker of an older version would be met: it names no transport, which means the same."""

    async def run() -> None:
        async with fleet(tmp_path, PAIR[:1]) as found:
            found.start(Role.DECODE, "decode-0", "kvtransfer.transports=tcp")
            records = await found.ready("prefill-0", "decode-0")
            await ask(found, records, "a")
            assert await received(records["decode-0"], "tcp") == 200 * 16
            assert await received(records["decode-0"], "shm") == 0
            assert "transport fallback" not in found.log("prefill-0").read_text()

    asyncio.run(run())
