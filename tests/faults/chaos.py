"""Seeded chaos over real processes: ``python -m tests.faults.chaos --seed 1 --minutes 10`` (``make chaos``).

Round after round, a load of varied requests meets random faults. No token may be wrong, compared with an engine that
nothing happens to; no request may hang: it ends whole, or with one typed error within its deadline; and after each
round, with everything mended, no worker has lost a block. The first violation ends the run and names its round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.client import Client
from baton.client.answer import Answer, Choice, collect
from baton.core.clock import SystemClock
from baton.core.errors import BatonError, Expired, Overloaded, PeerUnavailable
from baton.core.streams import closing
from baton.engine.config import EngineConfig
from gateway.prompt import load_model_text
from tests.faults.chaos_plan import REQUEST_SECONDS, Ask, Fault, Kind, Round, plan_round
from tests.faults.deployment import PATIENT, Deployment, content, deployment
from tests.faults.proxy import Barrier, Towards
from tests.stack import PRINCIPAL, Stack

GRACE_SECONDS = 20.0  # that a request may take past its deadline to say so, on a busy machine
SLOW_BYTES_PER_SECOND = 30_000
MAY_FAIL_WITH = (Overloaded, PeerUnavailable, Expired)
SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.TERMINATE: signal.SIGTERM, Kind.STOP: signal.SIGSTOP}
SETTINGS = ("engine.fake_step_ms=4", "engine.kv_blocks=300", "engine.max_step_tokens=64")


class Violation(AssertionError):
    """A promise was broken."""


def write_tokenizer(directory: Path) -> Path:
    """One token a byte: ids of the fake model above the alphabet have no text."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@dataclass
class Chaos:
    """Plays rounds on a deployment. ``outcomes`` counts how requests ended, ``faults`` what was done."""

    found: Deployment
    reference: Stack
    clients: list[Client]
    outcomes: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])

    async def play(self, planned: Round) -> None:
        """One round; Violation when something that must hold does not."""
        expected = [await self._undisturbed(ask) for ask in planned.asks]
        client = cycle(self.clients)
        async with asyncio.TaskGroup() as group:
            for ask, answer in zip(planned.asks, expected, strict=True):
                group.create_task(self._check(ask, answer, next(client)))
            for fault in planned.faults:
                group.create_task(self._break(fault))
        await self.found.heal()
        await self.found.assert_sound()

    async def _undisturbed(self, ask: Ask) -> Answer:
        async with closing(self.reference.gateway.generate(ask.request, PRINCIPAL)) as chunks:
            return await collect(chunks, ask.request.n)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _check(self, ask: Ask, expected: Answer, client: Client) -> None:
        await asyncio.sleep(ask.delay)
        got = tuple(Choice() for _ in expected.choices)
        name = ask.request.request_id
        try:
            async with asyncio.timeout(REQUEST_SECONDS + GRACE_SECONDS):
                outcome = await self._ask(ask, client, got)
        except TimeoutError as error:
            raise Violation(f"{name} hangs: {ask}") from error
        except MAY_FAIL_WITH as error:
            outcome = error.reason
        except BatonError as error:
            raise Violation(f"{name} ended with {error.reason}: {error.message}") from error
        if outcome in ("whole", "resumed") and content(Answer("", got)) != content(expected):
            raise Violation(f"{name} is wrong: {got}, expected {expected.choices}")
        for choice, whole in zip(got, expected.choices, strict=True):
            is_prefix = choice.token_ids == whole.token_ids[: len(choice.token_ids)]
            if not (is_prefix and whole.text.startswith(choice.text)):
                raise Violation(f"{name} is wrong up to where it ended: {choice}, expected {whole}")
        self.outcomes[outcome] += 1

    async def _ask(self, ask: Ask, client: Client, got: tuple[Choice, ...]) -> str:
        """How the request ended; what came is in ``got``."""
        if not await self._read(ask, client, got):
            return "whole"
        if not ask.returns or any(choice.finish is not None for choice in got):
            return "left"
        rest = replace(ask.request, resume=tuple(choice.token_ids for choice in got))
        await self._read(Ask(rest, 0.0), client, got)
        return "resumed"

    async def _read(self, ask: Ask, client: Client, got: tuple[Choice, ...]) -> bool:
        """True when the caller left before the end."""
        async with aclosing(client.stream(ask.request)) as chunks:
            async for chunk in chunks:
                got[chunk.index].add(chunk)
                if ask.leave_after is not None and len(got[0].token_ids) >= ask.leave_after:
                    return True
        return False

    # --- faults -------------------------------------------------------------------------------------------------------

    async def _break(self, fault: Fault) -> None:
        await asyncio.sleep(fault.delay)
        self.faults[fault.kind] += 1
        if fault.kind in SIGNALS:
            self.found.signal(fault.target, SIGNALS[fault.kind])
        else:
            self._break_connections(fault)
        await asyncio.sleep(fault.seconds)
        await self._mend(fault)

    def _break_connections(self, fault: Fault) -> None:
        proxy = self.found.proxies[fault.target]
        if fault.kind is Kind.RESET:
            proxy.reset()
        elif fault.kind is Kind.SLOW:
            proxy.bytes_per_second = SLOW_BYTES_PER_SECOND
        elif fault.kind is Kind.CORRUPT:
            proxy.corrupt_next_offer(random.Random(fault.bits))
        else:
            proxy.hold(Barrier(random.Random(fault.bits).choice(list(Towards))))

    async def _mend(self, fault: Fault) -> None:
        if fault.target in self.found.proxies:
            self.found.proxies[fault.target].heal()
        if fault.kind is Kind.STOP:
            self.found.signal(fault.target, signal.SIGCONT)
        elif fault.kind in SIGNALS:
            await self.found.replace(fault.target)


@asynccontextmanager
async def chaos(directory: Path, *settings: str) -> AsyncIterator[Chaos]:
    """A deployment, ``settings`` before its own, callers of both gateways, and the engine that nothing happens to."""
    tokenizer = write_tokenizer(directory / "tokenizer")
    texts = {"fake": load_model_text(tokenizer, SystemClock())}
    engine = EngineConfig(kv_blocks=4000, block_size=16, max_step_tokens=512)
    async with (
        Stack(prefill=0, decode=1, engine=engine, texts=texts) as reference,
        deployment(directory / "logs", *SETTINGS, *settings, tokenizer=tokenizer) as found,
        Client(found.addresses, found.key, resume=PATIENT) as one,
        Client(found.addresses[::-1], found.key, resume=PATIENT) as other,
    ):
        yield Chaos(found, reference, [one, other])


async def _run(arguments: argparse.Namespace, directory: Path) -> None:
    clock = asyncio.get_running_loop()
    async with chaos(directory, *arguments.set) as run:
        end = clock.time() + 60 * arguments.minutes
        for number in count(arguments.first):
            if clock.time() >= end:
                break
            planned = plan_round(arguments.seed, number)
            began = clock.time()
            print(f"round {number}: {len(planned.asks)} requests; {'; '.join(map(str, planned.faults))}", flush=True)
            await run.play(planned)
            print(f"round {number}: sound after {clock.time() - began:.1f} s", flush=True)
        print(f"requests: {dict(run.outcomes)}; faults: {dict(run.faults)}; nothing wrong, nothing lost, nothing hung")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="the round to begin with, to play a failed one again")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of all processes")
    parser.add_argument("--logs", type=Path, help="where the services' logs go; default: a new temporary directory")
    arguments = parser.parse_args()
    directory = arguments.logs or Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    print(f"chaos: seed {arguments.seed}, {arguments.minutes:g} minutes, logs in {directory}", flush=True)
    asyncio.run(_run(arguments, directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
