"""Every typed error crosses every kind of call intact; whatever else goes wrong becomes the right one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator

import pytest

from baton.core import errors
from baton.core.errors import BatonError, Expired, InvalidRequest, PeerUnavailable, by_reason
from baton.core.types import (
    DecodeRequest,
    KvChunk,
    KvConfirmation,
    Level,
    Metric,
    PrefillRequest,
    QuotaRefusal,
    TokenChunk,
)
from tests.contract.wire_doubles import (
    HELLO,
    QUERY,
    TICKET,
    TOKENS,
    WAYS,
    ScriptedDecode,
    ScriptedDirectory,
    ScriptedPlanner,
    ScriptedPrefill,
    ScriptedReceiver,
    decode,
    directory,
    planner,
    prefill,
    raises,
    receiver,
    soon,
)

MODEL_LIMIT = QuotaRefusal(Level.KEY, "app", "ünïcode/m", Metric.TOKENS_PER_MINUTE, 10**12, 7, 8, 9, 0.1 + 0.2)
NEVER = QuotaRefusal(Level.ORGANISATION, "acme", "", Metric.REQUESTS_PER_MINUTE, 0, 0, 0, 1, None)

ALL_ERRORS: list[BatonError] = [
    InvalidRequest("temperature: must be between 0 and 2, got 3 — ünïcode", field="temperature"),
    errors.TokenizerMissing("no tokenizer", field="text"),
    errors.ChatTemplateMissing("no template", field="messages"),
    errors.Unauthenticated("unknown key"),
    errors.PermissionDenied("not your model"),
    errors.UnknownModel("no such model: x"),
    errors.QuotaExceeded("12 requests a minute", retry_after=12.25),
    errors.QuotaExceeded("daily tokens used up"),
    errors.QuotaExceeded.of([MODEL_LIMIT, NEVER]),
    errors.Overloaded("queue is full", retry_after=0.1),
    errors.Draining("this server is draining", retry_after=0.1),
    errors.Busy("9 tokens are to be computed before", retry_after=0.125),
    PeerUnavailable("prefill-0 is gone"),
    errors.TransferRejected("ticket is closed"),
    errors.TransportUnavailable("the pool is not mapped"),
    errors.Conflict("etag: has changed"),
    errors.NotFound("organizations/o: does not exist"),
    errors.AlreadyExists("taken"),
    errors.CorruptTransfer("block 3: checksum differs"),
    Expired("deadline passed"),
    errors.Cancelled("taken over"),
    errors.ModelError("model.safetensors is truncated"),
    errors.ConfigError("planner.x: unknown key"),
    errors.StateUnavailable("redis did not answer in 50 ms"),
    BatonError("an internal error"),
]


def same_error(got: BatonError, expected: BatonError) -> None:
    assert type(got) is type(expected)
    assert got is not None
    assert got.message == expected.message
    assert got.reason == expected.reason
    assert getattr(got, "field", None) == getattr(expected, "field", None)
    assert getattr(got, "retry_after", None) == getattr(expected, "retry_after", None)
    assert set(getattr(got, "refusals", ())) == set(getattr(expected, "refusals", ()))


def test_the_list_above_holds_every_error_class() -> None:
    def tree(base: type[BatonError]) -> set[type[BatonError]]:
        return {base}.union(*(tree(child) for child in base.__subclasses__()))

    ours = {kind for kind in tree(BatonError) if kind.__module__ == "baton.core.errors"}
    assert {type(error) for error in ALL_ERRORS} == ours
    assert all(by_reason(error.reason) is type(error) for error in ALL_ERRORS)


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_every_call_raises_the_domains_error(way: str, error: BatonError) -> None:
    async def run() -> None:
        chunk, confirmation = KvChunk(TICKET, 0, 1, b"x"), KvConfirmation(TICKET, 0, 1)
        async with (
            planner(way, ScriptedPlanner(raises(error))) as plans,
            prefill(way, ScriptedPrefill(raises(error))) as prefills,
            receiver(way, ScriptedReceiver(raises(error))) as receives,
            directory(way, ScriptedDirectory(raises(error))) as knows,
        ):
            calls = [
                plans.plan(QUERY),
                prefills.prefill(PrefillRequest(TOKENS, TICKET)),
                receives.handshake(HELLO),
                receives.offer(chunk),
                receives.confirm(confirmation),
                knows.announce(HELLO, "127.0.0.1:1"),
                knows.publish("w", 1, 2, [b"a"], [b"b"]),
                knows.reset("w", 1, 2, [b"a"]),
                knows.holders([b"a"]),
                knows.peers(),
            ]
            for call in calls:
                with pytest.raises(BatonError) as raised:
                    await soon(call)
                same_error(raised.value, error)

    asyncio.run(run())


def test_a_bug_is_logged_once_and_does_not_leak(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with planner("wire", ScriptedPlanner(raises(ZeroDivisionError("secret")))) as plans:
            with pytest.raises(BatonError) as raised:
                await soon(plans.plan(QUERY))
        assert type(raised.value) is BatonError
        assert "secret" not in raised.value.message
        assert QUERY.request_id in raised.value.message

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    logged = [record for record in caplog.records if record.exc_info is not None]
    assert len(logged) == 1
    assert getattr(logged[0], "request_id", "") == QUERY.request_id


def test_a_stray_cancellation_inside_is_an_answer_not_a_silence() -> None:
    """As when a channel is closed under a call of the domain's: nobody cancelled this request, so it gets an error."""

    async def stray(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(token_ids=(1,))
        raise asyncio.CancelledError

    async def run() -> None:
        async with planner("wire", ScriptedPlanner(raises(asyncio.CancelledError()))) as plans:
            with pytest.raises(BatonError) as raised:
                await soon(plans.plan(QUERY))
            assert type(raised.value) is BatonError
        async with decode("wire", ScriptedDecode(stray)) as worker:
            stream = aiter(worker.generate(DecodeRequest(TOKENS)))
            await soon(anext(stream))
            with pytest.raises(BatonError) as raised:
                await soon(anext(stream))
            assert type(raised.value) is BatonError

    asyncio.run(run())


def test_a_long_message_is_shortened_and_still_arrives() -> None:
    async def run() -> None:
        error = InvalidRequest("ü" * 1_000_000, field="f" * 1_000_000)
        async with planner("wire", ScriptedPlanner(raises(error))) as plans:
            with pytest.raises(InvalidRequest) as raised:
                await soon(plans.plan(QUERY))
        assert raised.value.message.startswith("üüü")
        assert math.isclose(len(raised.value.message), 1024, abs_tol=64)

    asyncio.run(run())
