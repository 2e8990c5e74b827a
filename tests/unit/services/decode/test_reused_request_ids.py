"""Request ids are the clients': the same one may come from two tenants at a time, and from one client again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import TransferRejected
from baton.core.types import Attempt, KvConfirmation, PrefillMode
from tests.networks import NetworkFactory
from tests.stack import Stack, tokens


def test_requests_of_two_tenants_with_one_id_are_both_handed_over(network: NetworkFactory) -> None:
    async def run() -> None:
        async with Stack(network=network) as stack:
            gate = stack.workers["prefill-0"].gate
            gate.hold()
            first = replace(tokens(60, request_id="1", first=100), tenant="acme", salt=b"acme")
            second = replace(tokens(60, request_id="1", first=200), tenant="zeta", salt=b"zeta")
            asked = [asyncio.create_task(stack.generate(request)) for request in (first, second)]
            receiver = stack.workers["decode-0"].parts.receiver
            await stack.until(lambda: receiver.open_tickets == 2, "both have tickets")
            gate.release()
            for request, answer in zip((first, second), await asyncio.gather(*asked), strict=True):
                assert answer.placement is not None
                assert answer.placement.prefill_mode is PrefillMode.REMOTE
                assert answer.content == (await stack.alone(request)).content
            await stack.assert_idle()

    asyncio.run(run())


def test_what_comes_late_for_a_request_meets_a_dead_ticket_though_its_id_is_in_use_again() -> None:
    async def run() -> None:
        async with Stack() as stack:
            offers = stack.workers["decode-0"].offers
            await stack.generate(tokens(60, request_id="again", first=100))
            late = offers.offers[0]
            gate = stack.workers["prefill-0"].gate
            gate.hold()
            request = tokens(60, request_id="again", first=200)
            asked = asyncio.create_task(stack.generate(request))
            await gate.reached()
            assert stack.workers["decode-0"].parts.receiver.open_tickets == 1
            with pytest.raises(TransferRejected, match="is closed, open is"):
                await offers.inner.offer(late)
            with pytest.raises(TransferRejected, match="is closed, open is"):
                await offers.inner.confirm(KvConfirmation(late.ticket, late.first_block, late.block_count))
            gate.release()
            answer = await asked
            assert answer.placement is not None
            assert answer.placement.prefill_mode is PrefillMode.REMOTE
            assert [chunk.ticket.attempt for chunk in (late, offers.offers[-1])] == [Attempt(0, 1), Attempt(0, 2)]
            assert answer.content == (await stack.alone(request)).content
            await stack.assert_idle()

    asyncio.run(run())
