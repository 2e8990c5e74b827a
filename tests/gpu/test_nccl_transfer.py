"""KV sent by NCCL between two engine processes that share one GPU: correct, and whole again after every break."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch

from baton.core.errors import BatonError, TransportUnavailable
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.nccl import NcclIncoming, NcclOutgoing
from tests.gpu.workers import Worker, alone, prompt, sender_to, split, worker

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("nccl") is None, reason="needs a GPU and nccl4py"
)

CONFIG = KvTransferConfig(transports=("nccl",), acknowledge_seconds=60.0, transport_rest_seconds=0.001)
HASTY = KvTransferConfig(transports=("nccl",), acknowledge_seconds=6.0, transport_rest_seconds=0.001)
LIMIT_SECONDS = 280.0


@pytest.fixture(autouse=True)
def two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NCCL 2.30 and later allows it when told so; the engines' processes inherit it."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    yield


def run(scenario: Callable[[Worker, Worker], Awaitable[None]], config: KvTransferConfig = CONFIG) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_SECONDS), worker(1, config) as prefill, worker(2, config) as decode:
            assert [way.name for way in prefill.transports.outgoing] == ["nccl"]
            await scenario(prefill, decode)

    asyncio.run(main())


def ends(prefill: Worker, decode: Worker) -> tuple[NcclOutgoing, NcclIncoming]:
    outgoing, incoming = prefill.transports.outgoing[0], decode.transports.incoming[-1]
    assert isinstance(outgoing, NcclOutgoing)
    assert isinstance(incoming, NcclIncoming)
    return outgoing, incoming


def test_split_tokens_equal_those_of_one_engine() -> None:
    async def scenario(prefill: Worker, decode: Worker) -> None:
        sender = sender_to(decode, prefill, CONFIG)
        for length in (1, 16, 17, 333):
            request = prompt(length, salt=length)
            assert await split(request, prefill, decode, sender) == await alone(request, prefill)
        assert decode.engine.stats.prompt_tokens_computed == 0

    run(scenario)


def test_many_hand_overs_share_a_link_and_do_not_mix() -> None:
    async def scenario(prefill: Worker, decode: Worker) -> None:
        sender = sender_to(decode, prefill, CONFIG)
        requests = [prompt(40 + 9 * salt, salt) for salt in range(16)]
        answers = await asyncio.gather(*(split(each, prefill, decode, sender) for each in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer == await alone(request, prefill)
        assert len(ends(prefill, decode)[1]._joined) == 1

    run(scenario)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_communicator_aborted_amid_a_transfer_is_rebuilt(side: str) -> None:
    """Whoever leaves: what was under way fails or takes the next link, and the next request gets through."""

    async def scenario(prefill: Worker, decode: Worker) -> None:
        sender = sender_to(decode, prefill, HASTY)
        first = await split(prompt(100, 1), prefill, decode, sender)
        outgoing, incoming = ends(prefill, decode)
        [link] = incoming._joined.values()
        under_way = [asyncio.create_task(split(prompt(400, salt), prefill, decode, sender)) for salt in range(2, 8)]
        await asyncio.sleep(0.01)
        links = (prefill if side == "prefill" else decode).engine.links
        assert links is not None
        links.leave(link)
        for ended in await asyncio.gather(*under_way, return_exceptions=True):
            assert isinstance(ended, BatonError | list), ended
        again = None
        while again is None:
            try:
                again = await split(prompt(100, 1), prefill, decode, sender)
            except TransportUnavailable:
                await asyncio.sleep(0.01)
        assert again == first
        assert link not in incoming._joined.values()
        assert outgoing._links

    run(scenario, HASTY)


def test_a_killed_sender_s_link_ends_and_its_successor_has_one_of_its_own() -> None:
    async def main() -> None:
        request = prompt(200, 1)
        async with asyncio.timeout(LIMIT_SECONDS), worker(2, HASTY) as decode:
            async with worker(1, HASTY) as prefill:
                sender = sender_to(decode, prefill, HASTY)
                first = await split(request, prefill, decode, sender)
                under_way = asyncio.create_task(split(prompt(300, 2), prefill, decode, sender))
                await asyncio.sleep(0)
                prefill.kill_engine()
                [ended] = await asyncio.gather(under_way, return_exceptions=True)
                assert isinstance(ended, BatonError | list), ended
            async with worker(3, HASTY) as successor:
                again = await split(prompt(200, 1), successor, decode, sender_to(decode, successor, HASTY))
            assert again == first

    asyncio.run(main())
