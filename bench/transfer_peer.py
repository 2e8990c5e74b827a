"""The receiving worker of ``baton bench transfer``, a process of its own: ``python -m bench.transfer_peer SETTINGS``.

It is driven by lines of JSON: a number of tokens opens a reservation and a ticket for as many, anything else closes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import uvloop

from baton.core.clock import SystemClock
from baton.core.memory import keep_large_buffers
from baton.core.telemetry import SilentMeter
from baton.core.tether import die_with_parent
from baton.core.types import Attempt, StopRules, Ticket, TokenRequest
from baton.engine.client import EngineClient, spawn_engine
from baton.engine.config import EngineConfig
from baton.rpc.kvreceiver import kvreceiver_service
from baton.rpc.serving import ServerPolicy, serve
from bench.bare_grpc import bare_server
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.transports import open_transports

EPOCH = 2
ATTEMPT = Attempt(0, 1)
RECEIVER = "receiver"


def request_of(tokens: int, salt: int = 0) -> TokenRequest:
    """No other ``salt`` finds any of it in a cache."""
    prompt = tuple(1 + number % 96 for number in range(tokens))
    stop = StopRules(max_tokens=1, ignore_eos=True)
    return TokenRequest(f"transfer-{tokens}", prompt, attempt=ATTEMPT, stop=stop, salt=str(salt).encode())


@dataclass(frozen=True, slots=True)
class Peer:
    """The receiving worker as the bench sees it."""

    address: str
    bare_address: str
    process: asyncio.subprocess.Process

    @asynccontextmanager
    async def ticket(self, tokens: int) -> AsyncIterator[Ticket]:
        """For one hand-over. Leaving the block fails unless all of it has arrived."""
        await self._tell(tokens)
        yield Ticket(request_of(tokens).request_id, ATTEMPT, RECEIVER, EPOCH)
        await self._tell("close")

    async def _tell(self, word: object) -> None:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(word).encode() + b"\n")
        if json.loads(await stdout.readline() or b"null") != "done":
            raise RuntimeError(f"the receiving worker failed at {word}")


@asynccontextmanager
async def peer(
    engine: EngineConfig, kvtransfer: KvTransferConfig, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Peer]:
    """``environment``: what is set for its process besides what is set here."""
    settings = json.dumps([dataclasses.asdict(engine), dataclasses.asdict(kvtransfer), os.getpid()])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.transfer_peer",
        settings,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the receiving worker did not start")
        address, bare_address = json.loads(line)
        yield Peer(address, bare_address, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _serve(engine_config: EngineConfig, config: KvTransferConfig) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(spawn_engine(engine_config))
        transports = stack.enter_context(open_transports(engine, RECEIVER, EPOCH, config))
        receiver = KvReceiver(
            transports.answer, RECEIVER, *transports.incoming, meter=SilentMeter(), clock=SystemClock()
        )
        transports.receive(receiver)
        server = await stack.enter_async_context(
            serve([kvreceiver_service(receiver)], "127.0.0.1:0", SilentMeter(), ServerPolicy(drain=0.0))
        )
        bare = await stack.enter_async_context(bare_server())
        _say([server.address, bare])
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            await _receive(engine, receiver, lines, json.loads(line))


async def _receive(engine: EngineClient, receiver: KvReceiver, lines: asyncio.StreamReader, tokens: int) -> None:
    request = request_of(tokens)
    async with (
        engine.reserve(request) as reservation,
        receiver.accept(request.request_id, ATTEMPT, reservation, skip_blocks=0, context_tokens=tokens) as delivery,
    ):
        _say("done")
        await lines.readline()
        receiver.require_complete(delivery)
    _say("done")


def _say(word: object) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def main() -> None:
    engine, kvtransfer, parent = json.loads(sys.argv[1])
    die_with_parent(parent)
    keep_large_buffers()
    kvtransfer["transports"] = tuple(kvtransfer["transports"])
    uvloop.run(_serve(EngineConfig(**engine), KvTransferConfig(**kvtransfer)))


if __name__ == "__main__":
    main()
