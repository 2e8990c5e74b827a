"""Several choices of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.errors import InvalidRequest, Overloaded
from baton.core.types import Sampling
from gateway.fanout import choice_seed
from tests.unit.gateway.asking import ASK, complete, eventually
from tests.unit.gateway.doubles import Fault, Fleet, ScriptedDecode, answer, draw


@pytest.mark.parametrize("step", [1, 5])
def test_choices_equal_single_requests_with_their_derived_seeds(step: int) -> None:
    fleet = Fleet(ScriptedDecode("a", step=step))
    chunks = asyncio.run(fleet.ask(replace(ASK, n=4, sampling=Sampling(temperature=1.0))))
    for index in range(4):
        alone = complete(replace(ASK, seed=choice_seed(5, index)))
        assert answer(chunks, index).ids == alone.ids
        assert answer(chunks, index).text == alone.text
    fleet.assert_idle()


def test_later_choices_follow_the_first_token_to_the_same_worker() -> None:
    a, b = ScriptedDecode("a", [Fault(0, Overloaded("full"))]), ScriptedDecode("b")
    fleet = Fleet(a, b)
    asyncio.run(fleet.ask(replace(ASK, n=3)))
    assert (len(a.requests), len(b.requests)) == (1, 3)
    ids = [request.tokens.request_id for request in b.requests]
    assert len(set(ids)) == 3


def test_other_choices_wait_until_the_first_has_a_token() -> None:
    worker = ScriptedDecode("a")
    worker.hang_after = 0
    fleet = Fleet(worker)

    async def ask() -> int:
        task = asyncio.create_task(fleet.ask(replace(ASK, n=3)))
        await eventually(lambda: worker.open == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        started = len(worker.requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return started

    assert asyncio.run(ask()) == 1
    fleet.assert_idle()


def test_all_choices_end_with_the_error_of_one() -> None:
    fleet = Fleet(ScriptedDecode("a", [None, Fault(2, InvalidRequest("no"))]))
    with pytest.raises(InvalidRequest):
        asyncio.run(fleet.ask(replace(ASK, n=3)))
    fleet.assert_idle()


def test_a_bug_in_one_choice_ends_the_request_instead_of_hanging_it() -> None:
    def broken(seed: int, context: Sequence[int]) -> int:
        return draw(seed, context) if seed == 5 else 1 // 0

    fleet = Fleet(ScriptedDecode("a", drawn=broken))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fleet.ask(replace(ASK, n=2)))
    fleet.assert_idle()
