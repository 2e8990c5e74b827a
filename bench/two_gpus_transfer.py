"""The hand-over's part of ``bench.two_gpus``: copies, whole hand-overs, and how soon decode goes on after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from baton.cli.terminal import say
from baton.core.clock import SystemClock
from baton.core.config import Section, Settings
from baton.core.streams import closing
from baton.core.telemetry import SilentMeter
from baton.core.types import StopRules, TokenRequest
from baton.engine.client import EngineClient, spawn_engine
from baton.engine.config import EngineConfig, device_defaults
from bench.cuda_hand_overs import hand_overs, visible_gpus
from bench.cuda_transfer import DEVICE_TRANSPORTS, LLAMA_8B, PROMPTS, measure_pair
from bench.metrics import percentiles
from bench.prefill_runs import ClockedRun
from bench.transfer_peer import ATTEMPT
from bench.two_gpus_stack import Site
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.transports import Transports, open_transports

Note = Callable[[dict[str, Any]], None]
WARM_UPS, OUTPUT = 3, 24
BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Worker:
    engine: EngineClient
    transports: Transports
    receiver: KvReceiver


async def transfer(site: Site, repeats: int, note: Note) -> None:
    """From the site's first GPU to its second."""
    source, target = (int(gpu) for gpu in site.gpus[:2])
    found: dict[str, Any] = {}
    found["copies"] = measure_pair(source, target, repeats)
    note(found)
    found["hand_overs"] = await hand_overs(LLAMA_8B, PROMPTS, (source, target), DEVICE_TRANSPORTS, repeats, "full")
    note(found)
    await first_steps(site, repeats, lambda steps: note(found | steps))


async def first_steps(site: Site, repeats: int, note: Note) -> None:
    """The last part of ``transfer`` alone."""
    source, target = (int(gpu) for gpu in site.gpus[:2])
    found: list[dict[str, Any]] = []
    async with closing(_first_steps(site, (source, target), repeats)) as rows:
        async for row in rows:
            found.append(row)
            note({"first_steps": found})
            say(f"first step: {row}")


async def _first_steps(
    site: Site, gpus: tuple[int, int], repeats: int, prompts: Sequence[int] = PROMPTS
) -> AsyncIterator[dict[str, Any]]:
    """Real engines on both GPUs, the decode worker idle. From the report that the KV of the prompt's last chunk is
    written to the first token of the other engine's own, less one of its steps: what there is in between.

    Both fronts share this process. By cuda-ipc, offers and confirmations go over the door as between workers; by NCCL
    they take no wire.
    """
    kvtransfer = KvTransferConfig(transports=DEVICE_TRANSPORTS)
    async with _worker(site, 1, kvtransfer, gpus) as prefill, _worker(site, 2, kvtransfer, gpus[::-1]) as decode:
        for way in prefill.transports.outgoing:
            sender = KvSender(
                replace(prefill.transports.hello, transports=(way.name.value,)),
                lambda _: decode.receiver,
                [way],
                config=kvtransfer,
                meter=SilentMeter(),
                clock=SystemClock(),
            )
            for tokens in prompts:
                turns = [f"{way.name}-{turn}" for turn in range(WARM_UPS + repeats)]
                taken = [await _timed(prefill.engine, decode, sender, tokens, turn) for turn in turns]
                names = ("shipped_ms", "after_last_chunk_ms", "step_ms")
                figures = {name: percentiles([each[name] for each in taken[WARM_UPS:]]) for name in names}
                yield {"transport": way.name.value, "tokens": tokens} | figures


async def _timed(engine: EngineClient, decode: Worker, sender: KvSender, tokens: int, salt: str) -> dict[str, float]:
    prompt = tuple(1 + number % 96 for number in range(tokens))
    stop = StopRules(max_tokens=OUTPUT, ignore_eos=True)
    request = TokenRequest(
        f"first-{tokens}-{salt}", prompt, attempt=ATTEMPT, stop=stop, salt=f"{tokens}-{salt}".encode()
    )
    clock, times = SystemClock(), list[float]()
    async with decode.engine.reserve(request) as reservation, engine.prefill(request) as computing:
        run = ClockedRun(computing, clock)
        accepting = decode.receiver.accept(
            request.request_id, ATTEMPT, reservation, skip_blocks=0, context_tokens=tokens
        )
        async with accepting as delivery, asyncio.TaskGroup() as group:
            await sender.connect(delivery.ticket)
            drawn = group.create_task(run.first_token())
            await sender.ship(delivery.ticket, run, 0)
            shipped = clock.now()
            decode.receiver.require_complete(delivery)
        async for _ in reservation.decode(drawn.result()):
            times.append(clock.now())
    step = (times[-1] - times[0]) / (len(times) - 1)
    return {
        "shipped_ms": 1000 * (shipped - run.filled_at),
        "after_last_chunk_ms": 1000 * (times[0] - run.filled_at - step),
        "step_ms": 1000 * step,
    }


@asynccontextmanager
async def _worker(site: Site, epoch: int, kvtransfer: KvTransferConfig, gpus: Sequence[int]) -> AsyncIterator[Worker]:
    flags = [flag for flag in site.flags if flag.startswith("engine.")]
    flags += [f"engine.device={site.device}", f"engine.model={site.model}", f"engine.kv_blocks={BLOCKS}"]
    config = Settings.read(file=None, environ={}, flags=flags).fill(Section("engine", EngineConfig, device_defaults))
    name = f"worker-{epoch}"
    async with AsyncExitStack() as stack:
        with visible_gpus(*gpus):
            engine = await stack.enter_async_context(spawn_engine(config, on_progress=say))
        transports = stack.enter_context(open_transports(engine, name, epoch, kvtransfer))
        receiver = KvReceiver(transports.answer, name, *transports.incoming, meter=SilentMeter(), clock=SystemClock())
        transports.receive(receiver)
        yield Worker(engine, transports, receiver)
