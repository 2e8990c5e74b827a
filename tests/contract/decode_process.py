"""A worker process that only serves DecodeApi: `python -m tests.contract.decode_process`. Prints its address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.core.telemetry import SilentMeter
from baton.core.types import DecodeRequest, TokenChunk
from baton.rpc.serving import serve
from tests.contract.wire_doubles import ScriptedDecode, served_decode


async def one_token_then_nothing(request: DecodeRequest) -> AsyncIterator[TokenChunk]:
    yield TokenChunk(token_ids=(1,))
    await asyncio.Event().wait()


async def main() -> None:
    async with serve([served_decode(ScriptedDecode(one_token_then_nothing))], "127.0.0.1:0", SilentMeter()) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
