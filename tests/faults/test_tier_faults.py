"""The cache tier over real processes: killed, stopped, restarted, its files spoiled. No request notices but in time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.api import TierApi
from baton.core.streams import closing
from baton.core.types import DecodeRequest, ProcessRecord, Role, TierStats, TokenRequest
from baton.rpc.decode_link import DecodeLink
from baton.rpc.tier import TierClient, WarmClient
from services.kvtransfer.config import KvTransferConfig
from tests.answers import Answer, tokens
from tests.gates import GENEROUS_SECONDS
from tests.processes import Fleet, candidate, fleet
from tests.stack import Stack

LENGTH, FULL = 200, 192
BLOCKS = FULL // 16
OUTPUT = 12  # with it no further block is full
CACHED = (LENGTH + OUTPUT - 1) // 16
PATIENT = ("kvtransfer.tier_answer_seconds=20",)
SHORT_LEASE = ("state.lease_seconds=1",)


def asked(request_id: str = "r", **fields: Any) -> TokenRequest:
    return tokens(LENGTH, request_id=request_id, **fields)


async def ask(found: Fleet, worker: ProcessRecord, request: TokenRequest) -> Answer:
    answer = Answer()
    link = DecodeLink(candidate(worker), gateway_id="tests", security=found.security)
    async with link as decode, closing(decode.generate(DecodeRequest(request))) as chunks:
        async for chunk in chunks:
            answer = answer.plus(chunk)
    return answer


async def fresh_worker(found: Fleet, worker_id: str, *settings: str) -> ProcessRecord:
    """A worker with an empty prefix cache."""
    found.start(Role.DECODE, worker_id, *settings)
    return (await found.ready(worker_id))[worker_id]


async def tier_stats(found: Fleet) -> TierStats:
    record = (await found.records()).get("kvtransfer-0")
    return TierStats() if record is None or record.tier is None else record.tier


async def tier_until(found: Fleet, holds: Callable[[TierStats], bool], what: str) -> None:
    async def looked() -> bool:
        return holds(await tier_stats(found))

    await found.until(looked, what)


async def restart_tier(found: Fleet, *settings: str) -> ProcessRecord:
    """SIGKILL, and another process with the same id and directory."""
    before = (await found.records())["kvtransfer-0"]
    found.signal("kvtransfer-0", signal.SIGKILL)
    found.started["kvtransfer-0"].wait()
    found.start(Role.KVTRANSFER, "kvtransfer-0", *settings)

    async def is_another() -> bool:
        record = (await found.ready("kvtransfer-0"))["kvtransfer-0"]
        return record.epoch != before.epoch

    await found.until(is_another, "the tier is back")
    return (await found.ready("kvtransfer-0"))["kvtransfer-0"]


def usage(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


def test_the_tier_outlives_workers_and_itself_and_detects_spoiled_files(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "tier"
        settings = (*PATIENT, f"kvtransfer.tier_directory={directory}")
        processes = [(Role.KVTRANSFER, "kvtransfer-0"), (Role.DECODE, "decode-0")]
        async with fleet(tmp_path, processes, *settings) as found:
            cold = await ask(found, (await found.records())["decode-0"], asked())
            assert usage(cold) == 0
            await tier_until(found, lambda s: s.memory_blocks == s.disk_blocks == CACHED, "all is offloaded")
            second = await ask(found, await fresh_worker(found, "decode-1", *settings), asked())
            assert (second.token_ids, usage(second)) == (cold.token_ids, FULL)
            await tier_until(found, lambda s: s.hits == BLOCKS, "the hits are counted")

            await restart_tier(found, *settings)
            await tier_until(found, lambda s: s.disk_blocks == CACHED and not s.memory_blocks, "its disk is found")
            third = await ask(found, await fresh_worker(found, "decode-2", *settings), asked())
            assert (third.token_ids, usage(third)) == (cold.token_ids, FULL)

            for path in (directory / "kvtransfer-0").glob("*/*.kv"):
                whole = path.read_bytes()
                path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            await restart_tier(found, *settings)
            fourth = await ask(found, await fresh_worker(found, "decode-3", *settings), asked())
            assert (fourth.token_ids, usage(fourth)) == (cold.token_ids, 0)
            await tier_until(found, lambda s: s.corrupt > 0, "the corruption is counted")

    asyncio.run(main())


def test_warming_through_the_kvtransfer_process_pins_what_a_worker_computed(tmp_path: Path) -> None:
    async def main() -> None:
        processes = [(Role.KVTRANSFER, "kvtransfer-0"), (Role.PREFILL, "prefill-0")]
        async with fleet(tmp_path, processes, *PATIENT) as found:
            records = await found.ready("kvtransfer-0", "prefill-0")
            warm = WarmClient(found.channels.get(records["kvtransfer-0"].address))
            names = await warm.warm(asked(timeout=60.0))
            assert len(names) == BLOCKS
            await tier_until(found, lambda s: s.pinned_blocks == BLOCKS, "the prompt is pinned")
            answer = await ask(found, await fresh_worker(found, "decode-0", *PATIENT), asked("first"))
            assert usage(answer) == FULL

    asyncio.run(main())


@dataclass
class Struck:
    """The tier in its own process, struck when ``blow`` is due: at the look-up (0) or at the n-th get. Its worker takes
    it to hold everything."""

    client: TierClient
    strike: Callable[[], None]
    blow: int
    calls: int = 0
    causes: list[str] = field(default_factory=list)

    def find(self) -> TierApi | None:
        return None if self.causes else self  # type: ignore[return-value]

    def lost(self, cause: str) -> None:
        self.causes.append(cause)

    @property
    def is_there(self) -> bool:
        return not self.causes

    def leading(self, names: Sequence[bytes]) -> int:
        if self.blow == 0:
            self.strike()
        return len(names)

    def holds(self, names: Sequence[bytes]) -> None: ...

    def lacks(self, name: bytes) -> None: ...

    async def get(self, names: Sequence[bytes]) -> object:
        self.calls += 1
        if self.calls == self.blow:
            self.strike()
        return await self.client.get(names)


@asynccontextmanager
async def filled_tier(tmp_path: Path) -> AsyncIterator[tuple[Fleet, TierClient, Answer]]:
    """A tier that holds the request's blocks, and what the request answers."""
    async with fleet(tmp_path, [(Role.KVTRANSFER, "kvtransfer-0"), (Role.DECODE, "decode-0")], *PATIENT) as found:
        records = await found.ready("kvtransfer-0", "decode-0")
        cold = await ask(found, records["decode-0"], asked())
        await tier_until(found, lambda s: s.memory_blocks == CACHED, "all is offloaded")
        yield found, TierClient(found.channels.get(records["kvtransfer-0"].address), 1.0), cold


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("blow", [0, 1, 3])
def test_a_tier_struck_in_the_middle_of_a_fetch_costs_no_token(
    tmp_path: Path, signum: signal.Signals, blow: int
) -> None:
    async def main() -> None:
        async with filled_tier(tmp_path) as (found, client, cold):
            struck = Struck(client, lambda: found.signal("kvtransfer-0", signum), blow)
            config = KvTransferConfig(tier_message_bytes=2 * 256, tier_answer_seconds=1.0)
            async with Stack(prefill=0, decode=1, kvtransfer=config, tiers=struck) as stack:
                answer = await stack.generate(asked(timeout=GENEROUS_SECONDS))
                assert answer.token_ids == cold.token_ids
                assert struck.causes
                await stack.assert_idle()
                again = await stack.generate(replace(asked("again"), salt=b"other"))
                assert again.token_ids == cold.token_ids

    asyncio.run(main())


def test_workers_leave_a_stopped_tier_alone_and_come_back_to_it(tmp_path: Path) -> None:
    async def main() -> None:
        quick = ("kvtransfer.tier_answer_seconds=1",)
        processes = [(Role.KVTRANSFER, "kvtransfer-0"), (Role.DECODE, "decode-0"), (Role.DECODE, "decode-1")]
        async with fleet(tmp_path, processes, *quick, *SHORT_LEASE) as found:
            records = await found.ready("kvtransfer-0", "decode-0", "decode-1")
            cold = await ask(found, records["decode-0"], asked())
            await tier_until(found, lambda s: s.memory_blocks == CACHED, "all is offloaded")
            found.signal("kvtransfer-0", signal.SIGSTOP)
            stopped = await ask(found, records["decode-1"], asked(timeout=GENEROUS_SECONDS))
            assert (stopped.token_ids, usage(stopped)) == (cold.token_ids, 0)
            found.signal("kvtransfer-0", signal.SIGCONT)

            async def fetches_again() -> bool:
                worker = await fresh_worker(found, f"late-{len(found.started)}", *quick, *SHORT_LEASE)
                return usage(await ask(found, worker, asked())) == FULL

            await found.until(fetches_again, "a worker fetches from the tier that goes on")

    asyncio.run(main())
