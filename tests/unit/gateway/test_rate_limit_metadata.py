"""What callers are told of their limits, with an answer and with a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

import grpc
import grpc.aio
import pytest

from baton.core.types import Level, Limits, Metric, ModelLimits, Organisation, QuotaBalance, Tenant
from baton.rpc.rate_limits import granted_metadata
from protos.baton.v1 import gateway_pb2 as pb
from protos.baton.v1 import gateway_pb2_grpc
from tests.stored_records import store
from tests.unit.gateway.doubles import MODEL, Fleet, ScriptedDecode
from tests.unit.gateway.test_native_door import channel, door

REQUEST = pb.GenerateRequest(model=MODEL, prompt_token_ids=pb.TokenIds(ids=[7]))
REQUEST.options.stop.max_tokens, REQUEST.options.stop.ignore_eos = 24, True


async def limit(fleet: Fleet, limits: Limits, *rules: ModelLimits) -> None:
    tenant = Tenant("acme", "umbrella", limits=limits, model_limits=rules)
    await store(fleet.tenancy, Organisation("umbrella"), tenant)


async def asked(fleet: Fleet) -> tuple[dict[str, str], grpc.aio.AioRpcError | None]:
    """The metadata before the answer, or after the refusal, and the refusal."""
    async with door(fleet) as server, channel(server, fleet.key) as opened:
        call = gateway_pb2_grpc.GatewayServiceStub(opened.channel).Generate(REQUEST, metadata=opened.metadata())
        try:
            told = await call.initial_metadata()
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return dict(cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ())), error
        return dict(cast("Iterable[tuple[str, str]]", told or ())), None


def test_an_answer_begins_with_what_is_left() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        await limit(
            fleet,
            Limits(requests_per_minute=9, input_tokens_per_minute=100, tokens_per_day=10**6),
            ModelLimits(MODEL, Limits(requests_per_minute=5, output_tokens_per_minute=30)),
        )
        told, error = await asked(fleet)
        assert error is None
        kinds = {name: value for name, value in told.items() if name.startswith("x-ratelimit")}
        resets = [int(kinds.pop(f"x-ratelimit-reset-{kind}")) for kind in ("requests", "input-tokens", "output-tokens")]
        assert kinds == {
            "x-ratelimit-limit-requests": "5",
            "x-ratelimit-remaining-requests": "4",
            "x-ratelimit-limit-input-tokens": "100",
            "x-ratelimit-remaining-input-tokens": "99",
            "x-ratelimit-limit-output-tokens": "30",
            "x-ratelimit-remaining-output-tokens": "6",
        }
        assert all(0 <= reset <= 60 for reset in resets)

    asyncio.run(body())


def test_limits_that_refuse_nothing_are_not_told() -> None:
    async def body() -> None:
        for limits in (Limits(), Limits(requests_per_minute=0, shadow=frozenset({Metric.REQUESTS_PER_MINUTE}))):
            fleet = Fleet(ScriptedDecode("w0"))
            await limit(fleet, limits)
            told, error = await asked(fleet)
            assert error is None and not any(name.startswith("x-ratelimit") for name in told)

    asyncio.run(body())


def test_a_refusal_says_what_is_left_and_when_to_come_back() -> None:
    async def body() -> None:
        fleet = Fleet(ScriptedDecode("w0"))
        await limit(fleet, Limits(tokens_per_minute=30))
        assert (await asked(fleet))[1] is None
        told, error = await asked(fleet)
        assert error is not None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (told["x-ratelimit-limit-tokens"], told["x-ratelimit-remaining-tokens"]) == ("30", "5")
        assert 1 <= int(told["retry-after"]) <= 60 and told["x-ratelimit-reset-tokens"] == told["retry-after"]

    asyncio.run(body())


@pytest.mark.parametrize(("left", "told"), [((3, 8), "3"), ((8, 3), "3"), ((0, 1), "0")])
def test_of_several_limits_the_tightest_is_told(left: tuple[int, int], told: str) -> None:
    levels = (Level.ORGANISATION, Level.KEY)
    balances = [
        QuotaBalance(level, "s", "", Metric.TOKENS_PER_MINUTE, 10, 10 - remaining, 0, 0.2)
        for level, remaining in zip(levels, left, strict=True)
    ]
    metadata = dict(granted_metadata(balances))
    assert metadata["x-ratelimit-remaining-tokens"] == told and metadata["x-ratelimit-reset-tokens"] == "1"
