"""Unary calls behave the same on the object and over the wire: values, cancellation, deadlines, lost peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from baton.core.api import DirectoryApi
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, Expired, InvalidRequest, PeerUnavailable
from baton.core.types import (
    Attempt,
    CacheClass,
    CachePolicy,
    Candidate,
    FinishReason,
    FirstToken,
    KvChunk,
    KvConfirmation,
    KvSource,
    Plan,
    PlanLimits,
    PrefillRequest,
    PrefillResult,
    Tier,
    TokenLogprob,
    Usage,
)
from baton.rpc.channels import ChannelPool, Keepalive, open_channel
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.planner import PlannerClient, planner_service
from baton.rpc.prefill import PrefillClient, prefill_service
from baton.rpc.serving import ServerPolicy
from baton.rpc.wire.planner import plan_from_wire, plan_to_wire
from baton.rpc.wire.types import token_request_from_wire, token_request_to_wire
from protos.baton.v1 import planner_pb2 as pb
from services.kvtransfer.directory import Directory
from tests.contract.wire_doubles import (
    EPOCH,
    HELLO,
    PLAN,
    QUERY,
    TICKET,
    TOKENS,
    WAYS,
    Relay,
    ScriptedPlanner,
    ScriptedPrefill,
    ScriptedReceiver,
    answers,
    blocks,
    directory,
    planner,
    prefill,
    receiver,
    soon,
    until,
    wire,
)

DIRECTED = replace(
    TOKENS, attention_window=64, max_chunk_tokens=256, cache=CachePolicy(CacheClass.NONE, keep_tokens=32)
)
PREFILL = PrefillRequest(replace(DIRECTED, attempt=Attempt(1, 2)), TICKET, skip_blocks=3, max_wait=0.25)


def test_who_says_nothing_of_speculation_allows_it() -> None:
    """Callers and planners of a version that knows no drafts."""
    message = token_request_to_wire(TOKENS)
    message.ClearField("speculation")
    assert token_request_from_wire(message) == TOKENS
    silent = pb.PlanResponse(decode=[{"worker_id": "decode-0", "address": "a:1"}])
    assert plan_from_wire(silent).speculation


def test_who_says_nothing_of_limits_and_caching_gets_the_usual() -> None:
    """And what is usual is not sent: most plans and requests are as long as they were."""
    message = token_request_to_wire(TOKENS)
    assert not message.HasField("cache") and not message.HasField("max_chunk_tokens")
    assert token_request_from_wire(message) == TOKENS
    message.cache.keep_tokens = 5  # by a caller who names no class
    assert token_request_from_wire(message).cache == CachePolicy(CacheClass.NORMAL, 5)
    usual = plan_to_wire(PLAN)
    assert not usual.HasField("cache") and not usual.HasField("limits")
    assert plan_from_wire(usual) == PLAN


@pytest.mark.parametrize("cache_class", CacheClass)
def test_every_cache_class_arrives(cache_class: CacheClass) -> None:
    wanted = replace(TOKENS, cache=CachePolicy(cache_class))
    assert token_request_from_wire(token_request_to_wire(wanted)) == wanted


def test_a_cache_class_of_a_newer_version_is_refused_by_name() -> None:
    message = token_request_to_wire(DIRECTED)
    message.cache.cache_class = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"^CachePolicy.cache_class: unknown value 9"):
        token_request_from_wire(message)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_arrives_whole(way: str) -> None:
    plan = Plan(
        decode=(Candidate("decode-0", "127.0.0.1:1", EPOCH), Candidate("decode-1", "[::1]:2", 0)),
        prefill=(Candidate("prefill-0", "127.0.0.1:3", 1),),
        local_prefill_max_tokens=512,
        reasons=("least_load",),
        attention_window=4096,
        speculation=False,
        limits=PlanLimits(max_tokens=64, max_chunk_tokens=512, seconds=2.5),
        cache=CachePolicy(CacheClass.KEEP, keep_tokens=48),
        prefill_wait=0.125,
    )
    query = replace(QUERY, hop=2, priority=-1, avoid=("decode-7",), attention_window=512, tier=Tier.SILVER)

    async def run() -> None:
        domain = ScriptedPlanner(answers(plan))
        async with planner(way, domain) as plans:
            assert await soon(plans.plan(query)) == plan
        assert domain.script.seen == [query]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_result_arrives_whole(way: str) -> None:
    first = FirstToken(
        9, Usage(3, 2, 1), TokenLogprob(9, -0.25, ((9, -0.25),)), (None, TokenLogprob(2, -1.5)), FinishReason.STOP
    )
    result = PrefillResult(first, "prefill-0", kv_bytes=2**40)

    async def run() -> None:
        domain = ScriptedPrefill(answers(result))
        async with prefill(way, domain) as prefills:
            assert await soon(prefills.prefill(PREFILL)) == result
        assert domain.script.seen == [PREFILL]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_a_hand_over_arrives_whole(way: str) -> None:
    chunk = KvChunk(TICKET, 2, 3, payload=bytes(range(256)) * 12, checksums=(b"a" * 16, b"b" * 16, b"c" * 16))
    early = KvChunk(TICKET, 5, 2, source=KvSource(7, (1, 2), "shm"), payload=b"", late_checksums=b"\1\0")
    confirmation = KvConfirmation(TICKET, 2, 5, (b"", b"", b"", b"d" * 16, b"e" * 16))

    async def run() -> None:
        domain = ScriptedReceiver(answers(HELLO))
        async with receiver(way, domain) as receives:
            assert await soon(receives.handshake(HELLO)) == HELLO
            await soon(receives.offer(chunk))
            await soon(receives.offer(early))
            await soon(receives.confirm(confirmation))
        assert domain.script.seen == [HELLO, chunk, early, confirmation]

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_the_directory_answers_alike(way: str) -> None:
    hashes = [b"a" * 16, b"b" * 16, b"c" * 16]

    async def exercise(knows: DirectoryApi) -> None:
        await knows.announce(HELLO, "127.0.0.1:1")
        assert list(await knows.peers()) == [(HELLO, "127.0.0.1:1")]
        await knows.reset(HELLO.worker_id, HELLO.epoch, 4, hashes[:2])
        assert await knows.holders(hashes) == {HELLO.worker_id: 2}
        assert await knows.publish(HELLO.worker_id, HELLO.epoch, 5, [hashes[2]], [])
        assert await knows.holders(hashes) == {HELLO.worker_id: 3}
        assert not await knows.publish(HELLO.worker_id, HELLO.epoch, 9, [], [hashes[0]]), "a gap"

    async def run() -> None:
        domain = Directory(ManualClock(), max_blocks=100, peer_lease_seconds=10.0)
        async with directory(way, domain) as knows:
            await soon(exercise(knows))

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_cancelling_a_call_cancels_the_work(way: str) -> None:
    async def run() -> None:
        domain = ScriptedPrefill(blocks())
        async with prefill(way, domain) as prefills:
            task = asyncio.create_task(prefills.prefill(PREFILL))
            await soon(domain.script.begun.wait())
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await soon(domain.script.cancelled.wait())

    asyncio.run(run())


def test_a_deadline_travels_and_cancels_the_work() -> None:
    async def run() -> None:
        domain = ScriptedPrefill(blocks())
        async with prefill("wire", domain) as prefills:
            late = replace(PREFILL, tokens=replace(TOKENS, timeout=0.3))
            with pytest.raises(Expired):
                await soon(prefills.prefill(late))
            await soon(domain.script.cancelled.wait())
        seen = domain.script.seen[0]
        assert isinstance(seen, PrefillRequest)
        assert seen.tokens.timeout is not None
        assert 0 <= seen.tokens.timeout <= 0.301  # a millisecond: the wire rounds up

    asyncio.run(run())


def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async def run() -> None:
        async with wire() as (server, _):
            address = server.address
        async with ChannelPool() as channels:
            with pytest.raises(PeerUnavailable, match=address):
                await soon(PlannerClient(channels.get(address)).plan(QUERY))

    asyncio.run(run())


def test_closing_a_channel_under_a_call_does_not_look_like_a_cancelled_caller() -> None:
    async def run() -> None:
        domain = ScriptedPrefill(blocks())
        async with wire(prefill_service(domain)) as (server, _), ChannelPool() as channels:
            task = asyncio.create_task(PrefillClient(channels.get(server.address)).prefill(PREFILL))
            await soon(domain.script.begun.wait())
            await channels.discard(server.address)
            with pytest.raises(PeerUnavailable, match="closed"):
                await soon(task)
            await soon(domain.script.cancelled.wait())

    asyncio.run(run())


def test_a_peer_that_dies_in_a_call_is_unavailable() -> None:
    async def run() -> None:
        domain = ScriptedPrefill(blocks())
        async with wire(prefill_service(domain)) as (server, _):
            channel = open_channel(server.address)
            task = asyncio.create_task(PrefillClient(channel).prefill(PREFILL))
            await soon(domain.script.begun.wait())
        with pytest.raises(PeerUnavailable):
            await soon(task)
        await channel.close()

    asyncio.run(run())


def test_a_stopped_peer_is_noticed_in_a_call_without_a_deadline() -> None:
    async def run() -> None:
        domain = ScriptedPrefill(blocks())
        async with wire(prefill_service(domain)) as (server, _), Relay(server) as relay:
            channel = open_channel(relay.address, keepalive=Keepalive(interval=0.2, timeout=0.3))
            task = asyncio.create_task(PrefillClient(channel).prefill(PREFILL))
            await soon(domain.script.begun.wait())
            relay.freeze()
            with pytest.raises(PeerUnavailable):
                await soon(task)
            await channel.close()

    asyncio.run(run())


def test_a_silent_call_survives_its_pings() -> None:
    result = PrefillResult(FirstToken(1, Usage(3, 0, 1)), "prefill-0", 0)

    async def run() -> None:
        pings = Keepalive(interval=0.05, timeout=10.0)
        domain = ScriptedPrefill(blocks())
        service = prefill_service(domain)
        async with wire(service, policy=ServerPolicy(drain=0, keepalive=pings)) as (server, _), Relay(server) as relay:

            async def act() -> PrefillResult:
                before = relay.pings
                await until(lambda: relay.pings >= before + 5)  # a server that minds hangs up at the third or fourth
                return result

            domain.script.act = act
            channel = open_channel(relay.address, keepalive=pings)
            assert await soon(PrefillClient(channel).prefill(PREFILL)) == result
            await channel.close()

    asyncio.run(run())


def test_a_silent_peer_is_unavailable_and_not_the_requests_deadline() -> None:
    async def run() -> None:
        async with (
            wire(planner_service(ScriptedPlanner(blocks()))) as (_, plans),
            wire(kvreceiver_service(ScriptedReceiver(blocks()))) as (_, receives),
        ):
            with pytest.raises(PeerUnavailable, match=r"0\.1 s"):
                await soon(PlannerClient(plans, limit=0.1).plan(QUERY))
            with pytest.raises(PeerUnavailable, match=r"0\.1 s"):
                await soon(KvReceiverClient(receives, limit=0.1).confirm(KvConfirmation(TICKET, 0, 1)))

    asyncio.run(run())


def test_a_confirmation_that_waits_for_copies_has_no_limit_but_its_callers() -> None:
    async def run() -> None:
        script, copied = blocks(), asyncio.Event()
        script.act = copied.wait
        async with wire(kvreceiver_service(ScriptedReceiver(script))) as (_, peer):
            receives = KvReceiverClient(peer, limit=0.1)
            early = asyncio.create_task(receives.confirm(KvConfirmation(TICKET, 0, 1, (b"c" * 16,))))
            await soon(script.begun.wait())
            with pytest.raises(PeerUnavailable, match=r"0\.1 s"):
                await soon(receives.confirm(KvConfirmation(TICKET, 0, 1)))
            assert not early.done()
            copied.set()
            await soon(early)

    asyncio.run(run())


def test_a_value_that_cannot_be_sent_is_the_callers_mistake() -> None:
    async def run() -> None:
        async with planner("wire", ScriptedPlanner(blocks())) as plans:
            with pytest.raises(InvalidRequest, match="PlanRequest"):
                await plans.plan(replace(QUERY, prompt_tokens=-1))
        async with prefill("wire", ScriptedPrefill(blocks())) as prefills:
            with pytest.raises(InvalidRequest, match="TokenRequest"):
                await prefills.prefill(replace(PREFILL, tokens=replace(TOKENS, prompt=(1, 2**40))))

    asyncio.run(run())


@asynccontextmanager
async def answering(response: bytes) -> AsyncIterator[PlannerClient]:
    """A planner of another make that answers every query with these bytes."""

    async def plan(request: bytes, context: object) -> bytes:
        return response

    server = grpc.aio.server()
    handlers = {"Plan": grpc.unary_unary_rpc_method_handler(plan)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.PlannerService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        yield PlannerClient(channel)
    finally:
        await channel.close()
        await server.stop(None)


def test_an_incomplete_plan_is_refused_and_not_blamed_on_the_caller() -> None:
    incomplete = pb.PlanResponse(decode=[{"worker_id": "decode-0"}], local_prefill_max_tokens=5)
    decode = [{"worker_id": "d", "address": "a:1"}]
    blind = pb.PlanResponse(decode=decode, attention_window=0)
    mute = pb.PlanResponse(decode=decode, limits={"max_tokens": 0})
    still = pb.PlanResponse(decode=decode, limits={"max_chunk_tokens": 0})
    late = pb.PlanResponse(decode=decode, limits={"seconds": 0.0})
    never = pb.PlanResponse(decode=decode, limits={"seconds": float("nan")})
    hasty = pb.PlanResponse(decode=decode, prefill_wait=-1.0)
    odd = pb.PlanResponse(decode=decode, cache={"cache_class": 9})  # type: ignore[dict-item]

    async def run() -> None:
        for response, named in (
            (pb.PlanResponse(), "decode"),
            (incomplete, "address"),
            (blind, r"attention_window: must be at least 1, got 0"),
            (mute, r"PlanLimits.max_tokens: must be at least 1, got 0"),
            (still, r"PlanLimits.max_chunk_tokens: must be at least 1, got 0"),
            (hasty, r"PlanResponse.prefill_wait: must be a number of at least 0, got -1.0"),
            (late, r"PlanLimits.seconds: must be a number above 0, got 0.0"),
            (never, r"PlanLimits.seconds: must be a number above 0, got nan"),
            (odd, r"CachePolicy.cache_class: unknown value 9"),
        ):
            async with answering(response.SerializeToString()) as plans:
                with pytest.raises(BatonError, match=named) as raised:
                    await soon(plans.plan(QUERY))
            assert not isinstance(raised.value, InvalidRequest)

    asyncio.run(run())


def test_a_pool_keeps_one_channel_an_address() -> None:
    async def run() -> None:
        domain = ScriptedPlanner(answers(Plan((Candidate("d", "127.0.0.1:1", 1),), (), 0)))
        async with wire(planner_service(domain)) as (server, _), ChannelPool() as channels:
            channel = channels.get(server.address)
            assert channels.get(server.address) is channel
            await soon(PlannerClient(channel).plan(QUERY))
            await channels.discard(server.address)
            assert channels.get(server.address) is not channel
            await soon(PlannerClient(channels.get(server.address)).plan(QUERY))
            await until(lambda: server.in_flight == 0)

    asyncio.run(run())
