"""Each service killed, stopped or told to end while a request is held at each phase: the answer is whole and exact.

A phase is held by a barrier in the proxy before a worker, so the signal falls into it however busy the machine is.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import pytest

from baton.client.answer import Answer, Choice
from baton.core.types import GenerateRequest, Role
from tests.faults.conftest import Bench
from tests.faults.deployment import Deployment, content
from tests.faults.proxy import Barrier, Content, Towards

TRIES = 3
KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP


@dataclass(frozen=True)
class Phase:
    """Where a request is held: at the workers of ``role``, or, without one, once the client has its first tokens."""

    role: Role | None
    barrier: Callable[[], Barrier]


PHASES = {
    "opened": Phase(Role.DECODE, lambda: Barrier(Towards.SERVER, Content.PROMPT)),
    "asked": Phase(Role.PREFILL, lambda: Barrier(Towards.SERVER, Content.PROMPT)),
    "offered": Phase(Role.DECODE, lambda: Barrier(Towards.SERVER, Content.OFFER)),
    "acknowledged": Phase(Role.DECODE, lambda: Barrier(Towards.CLIENT, after=Content.OFFER)),
    "prefilled": Phase(Role.PREFILL, lambda: Barrier(Towards.CLIENT, after=Content.PROMPT)),
    "streaming": Phase(None, lambda: Barrier(Towards.CLIENT)),
}


async def disturbed(
    found: Deployment, request: GenerateRequest, phase: Phase, strike: Callable[[], None]
) -> Answer | None:
    """The answer to ``request``, with ``strike`` in the given phase. None: it was answered without that phase, as when
    a machine is so busy that a worker seems stopped."""
    if phase.role is None:
        return await _struck_while_streaming(found, request, strike)
    barrier = found.hold(phase.role, phase.barrier())
    asking = asyncio.create_task(found.client.ask(request))
    await asyncio.wait({asking, barrier.reached}, return_when=asyncio.FIRST_COMPLETED)
    is_held = barrier.reached.done()
    if is_held:
        strike()
    found.unhold()
    answer = await asking
    return answer if is_held else None


async def _struck_while_streaming(found: Deployment, request: GenerateRequest, strike: Callable[[], None]) -> Answer:
    choice, struck = Choice(), False
    async with aclosing(found.client.stream(request)) as chunks:
        async for chunk in chunks:
            choice.add(chunk)
            if not struck and len(choice.token_ids) >= 5:
                struck = True
                strike()
    assert struck
    return Answer("", (choice,))


def victim(found: Deployment, service: str) -> str:
    """The worker of that role which the request is at, or the one process of another service."""
    if service in (Role.PREFILL, Role.DECODE):
        return found.asked(Role(service))
    if service == Role.GATEWAY:
        return found.gateway_in_use
    return "redis" if service == "redis" else f"{service}-0"


@dataclass(frozen=True)
class Case:
    """A signal to a service while a request is held in a phase."""

    transport: str
    phase: str
    service: str
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.service}-{self.number.name}-{self.phase}-{self.transport}"


# By shared memory, which workers of one host take, and what a transport has a part in by TCP as well.
WORKER_CASES = [
    Case(transport, phase, service, number)
    for transport, phases in (("shm", tuple(PHASES)), ("tcp", ("offered", "acknowledged")))
    for phase in phases
    for service in ("prefill", "decode")
    for number in (KILL, TERM, STOP)
    if not (service == "prefill" and phase in ("opened", "streaming"))
]
OTHER_CASES = [
    Case("shm", "offered", service, number)
    for service in ("planner", "kvtransfer", "gateway", "redis")
    for number in (KILL, TERM, STOP)
    if (service, number) != ("redis", TERM)
]


@pytest.mark.parametrize(
    ("bench", "case"),
    [pytest.param(case.transport, case, id=str(case)) for case in (*WORKER_CASES, *OTHER_CASES)],
    indirect=["bench"],
    scope="module",  # else pytest takes the narrowest one for both, and each case starts a deployment of its own
)
def test_answer_survives_a_signal_to_each_service_in_each_phase(bench: Bench, case: Case) -> None:
    async def act(found: Deployment) -> None:
        for _ in range(TRIES):
            request = bench.story()
            strike = partial(_strike, found, case.service, case.number)
            answer = await disturbed(found, request, PHASES[case.phase], strike)
            if answer is not None:
                break
        else:
            raise AssertionError(f"the phase never came: {case.phase}")
        await found.heal()
        assert content(answer) == content(await found.client.ask(request))

    bench.run(act)


def _strike(found: Deployment, service: str, number: signal.Signals) -> None:
    found.signal(victim(found, service), number)
