"""A trace that a caller began goes through every hop: in metadata of unary calls, in the openings of the link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.core.types import Candidate, DecodeRequest, Plan, TokenChunk
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.planner import PlannerClient, planner_service
from baton.telemetry.traces import OpenTelemetryTracer
from tests.contract.wire_doubles import (
    HELLO,
    QUERY,
    TOKENS,
    Script,
    ScriptedDecode,
    ScriptedPlanner,
    ScriptedReceiver,
    link_to,
    served_decode,
    soon,
    wire,
)

PLAN = Plan((Candidate("decode-0", "127.0.0.1:1", 1),), (), 0)
TRACES = [f"00-{number:032x}-{number:016x}-01" for number in (7, 8)]
TRACER = OpenTelemetryTracer("tests")


def test_every_hop_is_part_of_the_callers_trace_and_no_other_ones() -> None:
    seen: list[str] = []

    def answering(value: object) -> Script:
        async def act() -> object:
            seen.append(TRACER.traceparent())
            return value

        return Script(act)

    async def chunks(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        seen.append(TRACER.traceparent())
        yield TokenChunk((1,))

    async def run() -> None:
        planner, receiver = ScriptedPlanner(answering(PLAN)), ScriptedReceiver(answering(HELLO))
        services = (planner_service(planner), kvreceiver_service(receiver))
        decode = served_decode(ScriptedDecode(chunks), tracer=TRACER)
        async with (
            wire(*services, decode, tracer=TRACER) as (server, peer),
            link_to(server.address, tracer=TRACER) as link,
        ):

            async def every_hop() -> None:
                await soon(PlannerClient(peer).plan(QUERY))
                await soon(KvReceiverClient(peer).handshake(HELLO))
                assert [chunk async for chunk in link.generate(DecodeRequest(TOKENS))]

            for trace in TRACES:
                with TRACER.span("the caller", parent=trace):
                    await every_hop()
            await every_hop()

    asyncio.run(run())
    assert seen == [TRACES[0]] * 3 + [TRACES[1]] * 3 + [""] * 3


def test_what_is_no_trace_context_is_ignored() -> None:
    for parent in ("", "junk", "00-0-0-00"):
        with TRACER.span("work", parent=parent):
            assert TRACER.traceparent() == ""
