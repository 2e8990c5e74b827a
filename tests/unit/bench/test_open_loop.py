from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from baton.cli.door import Door
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, Overloaded
from baton.core.types import GenerateChunk, GenerateRequest, Sampling
from bench.arrivals import Arrival
from bench.metrics import Record, Window
from bench.open_loop import WRONG_LENGTH, Load, OpenLoop, Share, Trace

WHOLE = Share(0, 1)
EVERY_SECOND = Trace(tuple(Arrival(float(at), prompt=8, output=3) for at in range(100)))


class ScriptedGateway:
    """Answers ``max_tokens`` ids, one a chunk, unless the script for a request's number says otherwise."""

    def __init__(self, *, errors: dict[int, BatonError] | None = None, tokens: dict[int, int] | None = None) -> None:
        self._errors = errors or {}
        self._tokens = tokens or {}
        self.asked: list[GenerateRequest] = []
        self.left = 0  # streams that were given up
        self.held: dict[int, asyncio.Event] = {}
        self.on_ask: Callable[[], None] = lambda: None

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        number = request.seed or 0
        self.asked.append(request)
        self.on_ask()
        try:
            if number in self.held:
                await self.held[number].wait()
            if number in self._errors:
                raise self._errors[number]
            for _ in range(self._tokens.get(number, request.max_tokens or 0)):
                yield GenerateChunk("r", token_ids=(1,))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.left += 1
            raise


def load_of(source: Trace = EVERY_SECOND) -> Load:
    return Load(
        door=Door("127.0.0.1:1", "key"),
        model="m",
        vocab_size=50,
        source=source,
        window=Window(5.0, 15.0),
        seed=1,
        prompt_seed=2,
        sampling=Sampling(),
        timeout=30.0,
    )


def run(gateway: ScriptedGateway, share: Share = WHOLE) -> list[Record]:
    async def main() -> list[Record]:
        clock = ManualClock(100.0)
        return await OpenLoop(gateway, load_of(), share, clock, start=clock.now()).run()

    return asyncio.run(main())


def test_every_request_is_sent_when_it_is_due_whatever_became_of_the_others() -> None:
    gateway = ScriptedGateway(errors={3: Overloaded("full", retry_after=1)})
    gateway.held[2] = asyncio.Event()  # never answered, and due before the window: nobody waits for it
    records = run(gateway)
    assert [record.due for record in records[:15]] == [float(at) for at in range(15)]
    assert all(record.timeline.sent == record.due for record in records)
    assert records[3].error == "OVERLOADED"
    assert records[2].ended is None
    assert gateway.left >= 1


def test_load_goes_on_until_every_judged_request_has_ended() -> None:
    gateway = ScriptedGateway()
    gateway.held[9] = asyncio.Event()

    def release_after_forty() -> None:
        if len(gateway.asked) == 40:
            gateway.held[9].set()

    gateway.on_ask = release_after_forty
    records = run(gateway)
    assert 40 <= len(records) < 50
    assert records[9].succeeded


def test_requests_ask_for_ids_and_a_length_and_nothing_ends_them_early() -> None:
    gateway = ScriptedGateway()
    run(gateway)
    first = gateway.asked[0]
    assert first.prompt_token_ids is not None
    assert len(first.prompt_token_ids) == 8
    assert (first.text, first.max_tokens, first.stop.ignore_eos, first.timeout) == (None, 3, True, 30.0)
    assert len({request.prompt_token_ids for request in gateway.asked}) == len(gateway.asked)


def test_an_answer_of_another_length_is_an_error() -> None:
    records = run(ScriptedGateway(tokens={6: 2}))
    assert [record.error for record in records[5:8]] == ["", WRONG_LENGTH, ""]


def test_shares_together_are_the_whole_run() -> None:
    whole = ScriptedGateway()
    run(whole)
    shares = [ScriptedGateway() for _ in range(3)]
    for index, gateway in enumerate(shares):
        run(gateway, Share(index, 3))
    judged = {number: ids(whole)[number] for number in range(15)}
    together = {number: prompt for gateway in shares for number, prompt in ids(gateway).items() if number < 15}
    assert together == judged


def ids(gateway: ScriptedGateway) -> dict[int, tuple[int, ...] | None]:
    return {request.seed or 0: request.prompt_token_ids for request in gateway.asked}
