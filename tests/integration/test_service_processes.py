"""Services as real processes: they find each other, serve, drain, and end for the right reasons."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import BatonError, Overloaded, UnknownModel
from baton.core.streams import closing
from baton.core.types import (
    DecodeRequest,
    PlanQuery,
    PrefillMode,
    ProcessRecord,
    Role,
    StopRules,
    TokenRequest,
    WorkerState,
)
from baton.rpc.channels import ClientSecurity
from baton.rpc.decode_link import DecodeLink
from baton.rpc.directory import DirectoryClient
from baton.rpc.planner import PlannerClient
from tests.answers import Answer
from tests.processes import Fleet, candidate, children, fleet, is_alive

PAIR = [(Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0")]
LONG = StopRules(max_tokens=6000, ignore_eos=True)

WORKER_SERIES = (
    "worker_time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "prefill_seconds",
    "engine_requests",
    "kv_blocks",
    "kv_transfer_latency_seconds",
    "kv_receive_failures",
    "kv_converted_bytes",
    "kv_send_failures",
    "tier_fetch_seconds",
    "tier_fetched_bytes",
    "tier_fetch_failures",
    "tier_offloaded_bytes",
    "tier_offload_dropped",
)
TIER_SERIES = ("tier_blocks", "tier_bytes", "tier_pinned_blocks", "tier_hits", "tier_misses", "tier_corrupt")
SHOWN = {
    "decode-0": WORKER_SERIES,
    "prefill-0": WORKER_SERIES,
    "planner-0": ("plans", "plans_refused", "plan_seconds"),
    "kvtransfer-0": ("catalogue_blocks", "catalogue_peers", *TIER_SERIES),
}
SHOWN_BY_ALL = ("rpc_requests", "rpc_errors", "rpc_duration_seconds")


def link(found: Fleet, record: ProcessRecord) -> DecodeLink:
    return DecodeLink(candidate(record), gateway_id="tests", security=found.security)


def request(request_id: str = "r", length: int = 200, *, first: int = 3, **fields: object) -> TokenRequest:
    prompt = tuple(range(first, first + length))
    made = TokenRequest(request_id, prompt, stop=StopRules(max_tokens=10, ignore_eos=True))
    return replace(made, **fields)


async def answer(found: Fleet, records: dict[str, ProcessRecord], asked: TokenRequest) -> Answer:
    whole = Answer()
    prefill = tuple(candidate(record) for record in records.values() if record.role is Role.PREFILL)
    async with (
        link(found, records["decode-0"]) as decode,
        closing(decode.generate(DecodeRequest(asked, prefill))) as chunks,
    ):
        async for chunk in chunks:
            whole = whole.plus(chunk)
    return whole


async def page(record: ProcessRecord, path: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{record.http_address}{path}", timeout=10) as response:
            return response.read().decode()

    return await asyncio.to_thread(read)


def series(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


def test_fleet_serves_and_shows_what_it_does(tmp_path: Path) -> None:
    async def run() -> None:
        processes = [*PAIR, (Role.PLANNER, "planner-0"), (Role.KVTRANSFER, "kvtransfer-0")]
        async with fleet(tmp_path, processes, "planner.local_prefill_max_tokens=0") as found:
            records = await found.ready(*found.started)
            assert await page(records["decode-0"], "/readyz") == "ready\n"
            before = records["decode-0"].stats.prompt_tokens_computed  # of the warm-up
            planner = PlannerClient(found.channels.get(records["planner-0"].address))

            async def planned() -> bool:
                try:
                    plan = await planner.plan(PlanQuery("r", "fake", "acme", 200, 10))
                except UnknownModel:  # it has not looked at the registry since the workers became ready
                    return False
                return [c.worker_id for c in (*plan.decode, *plan.prefill)] == ["decode-0", "prefill-0"]

            await found.until(planned, "the planner has seen both workers")
            result = await answer(found, records, request())
            assert result.placement and result.placement.prefill_mode is PrefillMode.REMOTE
            assert result.placement.kv_bytes == 200 * 16

            async def settled() -> bool:
                decode = (await found.records())["decode-0"].stats
                return decode.tokens_generated >= 9 and decode.held_blocks == 0

            await found.until(settled, "the registry shows the idle worker")
            stats = (await found.records())["decode-0"].stats
            assert stats.prompt_tokens_computed == before
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 2000
            metrics = await page(records["decode-0"], "/metrics")
            assert series(metrics, 'baton_kv_received_bytes_total{transport="shm"}') == 200 * 16
            assert (
                series(await page(records["prefill-0"], "/metrics"), 'baton_kv_sent_bytes_total{transport="shm"}')
                == 200 * 16
            )
            directory = DirectoryClient(found.channels.get(records["kvtransfer-0"].address))

            async def announced() -> bool:
                return {hello.worker_id for hello, _ in await directory.peers()} == {"prefill-0", "decode-0"}

            await found.until(announced, "both workers announced themselves")

            async def counted() -> bool:
                held = series(await page(records["kvtransfer-0"], "/metrics"), "baton_catalogue_blocks")
                return held == stats.cached_blocks + (await found.records())["prefill-0"].stats.cached_blocks

            await found.until(counted, "the directory counts the workers' cached blocks")
            for process_id, names in SHOWN.items():
                text = await page(records[process_id], "/metrics")
                assert [name for name in (*names, *SHOWN_BY_ALL) if f"# TYPE baton_{name}" not in text] == []
            for process_id in found.started:
                found.signal(process_id, signal.SIGTERM)
            assert {key: await found.ended(key) for key in found.started} == dict.fromkeys(found.started, 0)
            assert await found.records() == {}

    asyncio.run(run())


def test_drain_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [(Role.DECODE, "decode-0")]) as found:
            record = (await found.ready("decode-0"))["decode-0"]
            async with link(found, record) as decode:
                long = DecodeRequest(request("long", 20, stop=LONG))
                async with closing(decode.generate(long)) as chunks:
                    whole = Answer().plus(await anext(chunks))
                    found.signal("decode-0", signal.SIGTERM)

                    async def draining() -> bool:
                        return (await found.records())["decode-0"].state is WorkerState.DRAINING

                    await found.until(draining, "everyone sees the drain")
                    with pytest.raises(Overloaded, match="draining"):
                        await anext(decode.generate(DecodeRequest(request("late"))))
                    async for chunk in chunks:
                        whole = whole.plus(chunk)
                assert len(whole.token_ids) == 6000
            assert await found.ended("decode-0") == 0
            assert await found.records() == {}

    asyncio.run(run())


def test_worker_ends_with_an_error_when_its_engine_dies(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [(Role.DECODE, "decode-0")]) as found:
            [engine] = children(found.started["decode-0"].pid)
            os.kill(engine, signal.SIGKILL)
            assert await found.ended("decode-0") == 1
            assert await found.records() == {}  # told at once, not when the lease ends
            assert "the engine ended" in found.log("decode-0").read_text().splitlines()[-1]

    asyncio.run(run())


def test_hung_engine_ends_its_worker_and_the_request_goes_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        impatient = ("prefill.engine_stall_seconds=0.5", "engine.max_step_tokens=64", "engine.fake_step_ms=20")
        async with fleet(tmp_path, PAIR, *impatient) as found:
            records = await found.ready(*found.started)
            [engine] = children(found.started["prefill-0"].pid)
            asked = replace(request("long"), prompt=tuple(3 + n % 500 for n in range(3000)))
            task = asyncio.create_task(answer(found, records, asked))

            async def computing() -> bool:
                return (await found.records())["prefill-0"].stats.running > 0

            await found.until(computing, "prefill computes")
            os.kill(engine, signal.SIGSTOP)
            result = await task
            assert result.placement and result.placement.prefill_worker == "decode-0"  # nobody else was left
            assert await found.ended("prefill-0") == 1
            assert "the engine hangs" in found.log("prefill-0").read_text().splitlines()[-1]

    asyncio.run(run())


def test_stopped_prefill_worker_is_given_up_though_its_connection_stays_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [*PAIR, (Role.PREFILL, "prefill-1")]) as found:
            records = await found.ready(*found.started)
            await answer(found, records, request("connects"))
            found.signal("prefill-0", signal.SIGSTOP)
            result = await answer(found, records, request("stopped", first=9))
            assert result.placement and result.placement.prefill_worker == "prefill-1"

    asyncio.run(run())


def test_a_worker_is_alive_and_ready_whatever_becomes_of_its_peers(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, PAIR) as found:
            records = await found.ready(*found.started)
            await answer(found, records, request("connects"))
            for number in (signal.SIGSTOP, signal.SIGKILL):
                found.signal("prefill-0", number)
                result = await answer(found, records, request(number.name, first=int(number)))
                assert result.placement and result.placement.prefill_mode is PrefillMode.LOCAL
                assert await page(records["decode-0"], "/healthz") == "ok\n"
                assert await page(records["decode-0"], "/readyz") == "ready\n"

    asyncio.run(run())


def test_a_worker_has_answered_once_before_it_is_ready(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, PAIR) as found:
            for record in (await found.ready(*found.started)).values():
                assert record.stats.prompt_tokens_computed > 0
                assert record.stats.tokens_generated > 0

    asyncio.run(run())


def test_engine_dies_with_its_killed_worker(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [(Role.DECODE, "decode-0")]) as found:
            [engine] = children(found.started["decode-0"].pid)
            found.signal("decode-0", signal.SIGKILL)
            await found.until(lambda: not is_alive(engine), "the engine is gone")

    asyncio.run(run())


def test_killed_prefill_mid_request_is_replaced_by_the_next_candidate(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [*PAIR, (Role.PREFILL, "prefill-1")], "engine.max_step_tokens=64") as found:
            records = await found.ready(*found.started)
            asked = request("first", 3000)
            asked = replace(asked, prompt=tuple(3 + n % 500 for n in range(3000)))
            task = asyncio.create_task(answer(found, records, asked))
            while not task.done() and (await found.records())["prefill-0"].stats.running == 0:
                await asyncio.sleep(0)
            found.signal("prefill-0", signal.SIGKILL)
            first = await task
            again = await answer(found, records, replace(asked, request_id="again"))
            assert again.content == first.content
            assert again.placement and again.placement.prefill_worker == "prefill-1"

    asyncio.run(run())


def test_redis_gone_does_not_touch_running_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, PAIR) as found:
            records = await found.ready(*found.started)
            async with link(found, records["decode-0"]) as decode:
                async with closing(decode.generate(DecodeRequest(request("long", 20, stop=LONG)))) as chunks:
                    whole = Answer().plus(await anext(chunks))
                    os.kill(found.redis_pid, signal.SIGKILL)
                    async for chunk in chunks:
                        whole = whole.plus(chunk)
                assert len(whole.token_ids) == 6000
            again = await answer(found, records, request("without-redis"))
            assert again.placement and again.placement.prefill_mode is PrefillMode.REMOTE
            found.signal("decode-0", signal.SIGTERM)
            assert await found.ended("decode-0") == 0

    asyncio.run(run())


def test_caller_without_the_shared_token_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [(Role.DECODE, "decode-0")]) as found:
            record = (await found.ready("decode-0"))["decode-0"]
            stranger = ClientSecurity("wrong")
            async with DecodeLink(candidate(record), gateway_id="tests", security=stranger) as decode:
                with pytest.raises(BatonError, match="shared token is missing or wrong"):
                    await anext(decode.generate(DecodeRequest(request())))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "decode.colour=red"), "unknown key decode.colour"),
        (("--set", "kvtransfer.checksums=some"), "kvtransfer.checksums must be one of full, off, got 'some'"),
        (("--set", "engine.block_size=large"), "engine.block_size must be int, got 'large'"),
    ],
)
def test_bad_setting_ends_the_start_with_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.decode", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_printed_configuration_hides_secrets() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.prefill", "--set", "prefill.service_token=hush", "--print-config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "hush" not in result.stdout
    assert 'service_token = "***"' in result.stdout
    assert "[engine]" in result.stdout


def test_port_in_use_is_said_and_ends_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet(tmp_path, [(Role.PLANNER, "planner-0")]) as found:
            port = (await found.ready("planner-0"))["planner-0"].address.rpartition(":")[2]
            found.start(Role.PLANNER, "planner-1", f"planner.port={port}")
            assert await found.ended("planner-1") == 1
            assert f"cannot listen on 127.0.0.1:{port}" in found.log("planner-1").read_text()

    asyncio.run(run())
