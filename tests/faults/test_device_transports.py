"""Hand-overs between pools on a (fake) device: by mapping the sender's pool, or by a link of communicators."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import TransportUnavailable
from baton.core.types import DevicePool, KvChunk, PrefillMode, Role
from baton.engine.fake_device import FakeCommunicator, FakeCommunicators, FakeCopies
from tests.faults.test_transports import PAIR, ask, mapped_pools, received
from tests.networks import NetworkFactory
from tests.processes import Fleet, children, fleet
from tests.stack import ENGINE, SMALL_MESSAGES, Stack, tokens

ALL = ("cuda-ipc", "nccl", "shm", "tcp")
BOTH = pytest.mark.parametrize("transport", ["cuda-ipc", "nccl"])


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "fake_pool", "device")


def copies_of(stack: Stack, worker_id: str) -> FakeCopies:
    runner = stack.workers[worker_id].runner
    assert isinstance(runner.copies, FakeCopies)
    return runner.copies


def taken_by(chunks: list[KvChunk]) -> set[str]:
    return {"tcp" if chunk.source is None else chunk.source.transport for chunk in chunks}


def run_stack(scenario: Callable[[Stack], Awaitable[None]], network: NetworkFactory, **changes: object) -> None:
    async def main() -> None:
        async with Stack(network=network, **changes) as stack:  # type: ignore[arg-type]
            await scenario(stack)
            await stack.assert_idle()

    asyncio.run(main())


@pytest.mark.parametrize(("offered", "taken"), [(ALL, "cuda-ipc"), (("nccl", "tcp"), "nccl"), (("shm", "tcp"), "tcp")])
def test_the_best_way_that_both_pools_have_is_taken(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch, offered: tuple[str, ...], taken: str
) -> None:
    monkeypatch.setattr(Stack, "transports", offered)
    wanted = tokens(200, seed=5, logprobs=2)

    async def scenario(stack: Stack) -> None:
        answer = await stack.generate(wanted)
        assert answer.content == (await stack.alone(wanted)).content
        offers = stack.workers["decode-0"].offers.offers
        assert taken_by(offers) == {taken}
        assert len(offers) > 1
        assert not any(chunk.body for chunk in offers) or taken == "tcp"

    run_stack(scenario, network)


@BOTH
def test_many_hand_overs_at_once_do_not_mix(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(Stack, "transports", (transport,))
    wanted = [replace(tokens(40 + 9 * i, seed=i), request_id=f"r{i}", salt=bytes([i])) for i in range(12)]

    async def scenario(stack: Stack) -> None:
        answers = await asyncio.gather(*(stack.generate(each) for each in wanted))
        for each, answer in zip(wanted, answers, strict=True):
            assert answer.content == (await stack.alone(each)).content
        assert taken_by(stack.workers["decode-0"].offers.offers) == {transport}

    run_stack(scenario, network, engine=replace(ENGINE, kv_blocks=512))


@BOTH
def test_one_flipped_bit_in_a_copy_is_caught(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The sender's pool changes after it was digested and before it is copied: nothing of the copy becomes valid."""
    monkeypatch.setattr(Stack, "transports", (transport,))
    wanted = tokens(200, seed=5)

    async def scenario(stack: Stack) -> None:
        source = copies_of(stack, "prefill-0").memory
        size = source.layout.block_bytes
        flipped, blocks = 0, -(-200 // ENGINE.block_size)

        async def flip(chunk: KvChunk) -> KvChunk:
            nonlocal flipped
            if chunk.first_block + chunk.block_count == blocks:
                flipped += 1
                assert chunk.source is not None
                if chunk.source.blocks:
                    await stack.until(lambda: bool(offers.confirmations), "the sender has digested all of its blocks")
                    source.view[chunk.source.blocks[0] * size] ^= 0x10
                else:
                    changed = bytearray(chunk.checksums[0])
                    changed[3] ^= 1
                    return replace(chunk, checksums=(bytes(changed), *chunk.checksums[1:]))
            return chunk

        offers = stack.workers["decode-0"].offers
        offers.on_offer = flip
        answer = await stack.generate(wanted)
        assert flipped == 1
        assert answer.content == (await stack.alone(wanted)).content
        assert answer.placement is not None
        assert answer.placement.prefill_mode is PrefillMode.LOCAL, "the only prefill worker sent what was corrupt"

    run_stack(scenario, network)


@BOTH
def test_a_device_that_refuses_gives_way_to_bytes(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Stack, "transports", (transport, "tcp"))
    wanted = tokens(200, seed=5)

    async def scenario(stack: Stack) -> None:
        copies = copies_of(stack, "decode-0")
        monkeypatch.setattr(copies, "open", refuse)
        monkeypatch.setattr(copies, "communicators", BrokenCommunicators(copies))
        answer = await stack.generate(wanted)
        assert answer.content == (await stack.alone(wanted)).content
        assert taken_by(stack.workers["decode-0"].offers.offers) == {transport, "tcp"}
        assert {chunk.ticket.attempt.retry for chunk in stack.workers["decode-0"].offers.offers} == {1}

    with caplog.at_level(logging.WARNING):
        run_stack(scenario, network, kvtransfer=replace(SMALL_MESSAGES, acknowledge_seconds=4.0))
    assert [record.message for record in caplog.records].count("transport fallback") == 1


def test_blocks_given_back_during_a_copy_are_fenced(network: NetworkFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "transports", ("cuda-ipc",))
    wanted = tokens(200, seed=5)

    async def scenario(stack: Stack) -> None:
        copies = copies_of(stack, "decode-0")
        copies.is_held = lambda: True
        offers = stack.workers["decode-0"].offers.offers
        task = asyncio.create_task(stack.generate(wanted))
        await stack.until(lambda: bool(offers) and bool(copies._begun), "a copy has begun")
        task.cancel()
        await asyncio.wait({task})
        await stack.until(lambda: copies.fences > 0, "steps wait for the copy")
        copies.is_held = lambda: False
        assert (await stack.generate(replace(wanted, request_id="next"))).content == (await stack.alone(wanted)).content

    run_stack(scenario, network)


@BOTH
def test_a_killed_sender_leaves_nothing_and_its_successor_is_joined_anew(tmp_path: Path, transport: str) -> None:
    settings = ("engine.fake_pool=device", f"kvtransfer.transports={transport},tcp")

    async def scenario(found: Fleet) -> None:
        records = await found.ready("prefill-0", "decode-0")
        alone = mapped_pools(records["decode-0"])
        first = await ask(found, records, "a")
        assert mapped_pools(records["decode-0"]) == alone + (transport == "cuda-ipc")
        found.signal("prefill-0", signal.SIGKILL)
        await found.until(lambda: mapped_pools(records["decode-0"]) == alone, "nothing of the dead one is mapped")
        await found.ended("prefill-0")
        found.start(Role.PREFILL, "prefill-0", *settings)

        async def is_back() -> bool:
            return (await found.ready("prefill-0"))["prefill-0"].epoch != records["prefill-0"].epoch

        await found.until(is_back, "another life of the prefill worker")
        records = await found.ready("prefill-0", "decode-0")
        assert (await ask(found, records, "b")).token_ids == first.token_ids
        assert await received(records["decode-0"], transport) == 2 * 200 * 16
        assert await received(records["decode-0"], "tcp") == 0
        assert len(children(records["decode-0"].pid)) == 1

    async def run() -> None:
        async with fleet(tmp_path, PAIR, *settings) as found:
            await scenario(found)

    asyncio.run(run())


def refuse(pool: DevicePool) -> None:
    raise TransportUnavailable("no peer access")


class BrokenCommunicators(FakeCommunicators):
    def join(self, invitation: bytes, rank: int) -> FakeCommunicator:
        raise TransportUnavailable("no communicator here")


class HangingCommunicator(FakeCommunicator):
    def is_settled(self) -> bool:
        return False


def test_a_link_that_hangs_is_aborted_within_its_limit_and_another_one_is_made(
    network: NetworkFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stack, "transports", ("nccl", "tcp"))
    hung: list[HangingCommunicator] = []
    wanted = tokens(200, seed=5)

    async def scenario(stack: Stack) -> None:
        copies = copies_of(stack, "decode-0")
        join = copies.communicators.join

        def join_and_hang(invitation: bytes, rank: int) -> FakeCommunicator:
            if hung:
                return join(invitation, rank)
            hung.append(HangingCommunicator(copies, invitation, None))
            return hung[0]

        monkeypatch.setattr(copies.communicators, "join", join_and_hang)
        answer = await stack.generate(wanted)
        assert answer.content == (await stack.alone(wanted)).content
        assert [each.is_aborted for each in hung] == [True]
        again = await stack.generate(replace(wanted, request_id="next", salt=b"next"))
        assert again.content == answer.content
        offers = stack.workers["decode-0"].offers.offers
        assert taken_by([chunk for chunk in offers if chunk.ticket.request_id != "next"]) >= {"nccl", "tcp"}
        assert taken_by([chunk for chunk in offers if chunk.ticket.request_id == "next"]) == {"nccl"}

    hasty = replace(SMALL_MESSAGES, acknowledge_seconds=2.0, transport_rest_seconds=0.001)
    run_stack(scenario, network, kvtransfer=hasty)
