"""Several choices of one request as one stream."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

from baton.core.streams import closing
from baton.core.types import GenerateChunk

BUFFERED_CHUNKS = 16

ChoiceStream = Callable[[str], AsyncIterator[GenerateChunk]]
"""Opens a choice's stream, given the id of a decode worker to prefer ("" for none)."""


def request_seed(tenant: str, request_id: str) -> int:
    """The seed of a request that brought none, 63 bits: the same for the same id, so a resumed request draws alike."""
    digest = hashlib.blake2b(f"{tenant}\0{request_id}".encode(), digest_size=8, person=b"baton-reqseed").digest()
    return int.from_bytes(digest, "little") >> 1


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``, 63 bits. Choice 0 keeps the request's own: n = 1 draws what n > 1 draws first."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8, person=b"baton-choice").digest()
    return int.from_bytes(digest, "little") >> 1


async def fan_out(choices: Sequence[ChoiceStream]) -> AsyncIterator[GenerateChunk]:
    """Chunks of all choices as they come.

    Choice 0 starts alone; the others follow its first chunk, to the same worker if they can, where they find its prompt
    in the prefix cache. The first error ends all of them; closing the stream does too.
    """
    if len(choices) == 1:
        async with closing(choices[0]("")) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    merge = _Merge()
    try:
        merge.start(choices[0](""))
        first = await merge.next()
        worker = first.placement.decode_worker if first is not None and first.placement else ""
        for choice in choices[1:]:
            merge.start(choice(worker))
        chunk = first
        while True:
            if chunk is not None:
                yield chunk
            elif merge.done:
                return
            chunk = await merge.next()
    finally:
        await merge.stop()


class _Merge:
    """Pumps streams into one queue of bounded length, so that a slow reader slows them all down."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[GenerateChunk | asyncio.Task[None]] = asyncio.Queue()
        self._room = asyncio.Semaphore(BUFFERED_CHUNKS)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = 0

    @property
    def done(self) -> bool:
        return self._ended == len(self._tasks)

    def start(self, stream: AsyncIterator[GenerateChunk]) -> None:
        task = asyncio.create_task(self._pump(stream))
        task.add_done_callback(self._queue.put_nowait)
        self._tasks.append(task)

    async def next(self) -> GenerateChunk | None:
        """The next chunk of any stream; None: one of them ended. Raises what a stream that failed raised."""
        item = await self._queue.get()
        if isinstance(item, GenerateChunk):
            self._room.release()
            return item
        self._ended += 1
        item.result()
        return None

    async def stop(self) -> None:
        """Cancel what still runs and wait until it has let go of everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, stream: AsyncIterator[GenerateChunk]) -> None:
        async with closing(stream) as chunks:
            async for chunk in chunks:
                await self._room.acquire()
                self._queue.put_nowait(chunk)
