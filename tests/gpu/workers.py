"""Two workers whose engines are processes of their own on this GPU, with real models: the hand-over between them.

Their fronts share this process and speak to each other directly: offers and confirmations take no wire.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import psutil

from baton.core.clock import SystemClock
from baton.core.telemetry import SilentMeter
from baton.core.types import Attempt, StopRules, TokenRequest
from baton.engine.client import EngineClient, spawn_engine
from baton.engine.config import EngineConfig
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.transports import Transports, open_transports
from tests.gpu.gpu_engines import PLAIN

ATTEMPT = Attempt(0, 1)


def engine_config(**changes: object) -> EngineConfig:
    """The reference in float32: bit-equal tokens are asked for, and nothing but the copying kernels is compiled."""
    settings = {"dtype": "float32", "device": "cuda", "backend": "torch", "kv_blocks": 512} | changes
    return EngineConfig(PLAIN, **settings)  # type: ignore[arg-type]


def engine_pids() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if "baton.engine.process" in child.cmdline()}


def prompt(length: int, salt: int = 0) -> TokenRequest:
    tokens = tuple(3 + (7 * index + 11 * salt) % 300 for index in range(length))
    stop = StopRules(max_tokens=12, ignore_eos=True)
    return TokenRequest(f"r{salt}-{length}", tokens, stop=stop, salt=str(salt).encode(), attempt=ATTEMPT)


@dataclass
class Worker:
    engine: EngineClient
    transports: Transports
    receiver: KvReceiver
    pid: int  # of the engine's process

    def kill_engine(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@asynccontextmanager
async def worker(epoch: int, config: KvTransferConfig, **changes: object) -> AsyncIterator[Worker]:
    """``changes`` of its engine's configuration."""
    async with AsyncExitStack() as stack:
        before = engine_pids()
        engine = await stack.enter_async_context(spawn_engine(engine_config(**changes)))
        [pid] = engine_pids() - before
        transports = stack.enter_context(open_transports(engine, f"w{epoch}", epoch, config))
        receiver = KvReceiver(
            transports.answer, f"w{epoch}", *transports.incoming, meter=SilentMeter(), clock=SystemClock()
        )
        transports.receive(receiver)
        yield Worker(engine, transports, receiver, pid)


def sender_to(receiver: Worker, sender: Worker, config: KvTransferConfig) -> KvSender:
    return KvSender(
        sender.transports.hello,
        lambda _: receiver.receiver,
        sender.transports.outgoing,
        config=config,
        meter=SilentMeter(),
        clock=SystemClock(),
    )


async def split(request: TokenRequest, prefill: Worker, decode: Worker, sender: KvSender) -> list[int]:
    """The tokens that ``decode`` goes on with from KV that ``prefill`` computed and handed over."""
    tokens = len(request.prompt)
    async with decode.engine.reserve(request) as reservation, prefill.engine.prefill(request) as run:
        skip = reservation.cached_tokens // decode.engine.card.format.block_size
        accepting = decode.receiver.accept(
            request.request_id, ATTEMPT, reservation, skip_blocks=skip, context_tokens=tokens
        )
        async with accepting as delivery:
            await sender.ship(delivery.ticket, run, skip)
            decode.receiver.require_complete(delivery)
        first = await run.first_token()
        rest = [token async for chunk in reservation.decode(first) for token in chunk.token_ids]
        return [first.token_id, *rest]


async def alone(request: TokenRequest, worker: Worker) -> list[int]:
    async with worker.engine.reserve(request) as reservation:
        return [token async for chunk in reservation.decode(None) for token in chunk.token_ids]
