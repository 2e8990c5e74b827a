"""Work that goes on beside other work, and no longer than it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task that goes on beside the block. It is cancelled where the block ends before it."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await end(task)


async def end(task: asyncio.Future[Any]) -> None:
    """Whatever it ended with concerns nobody who has not heard of it yet."""
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif not task.cancelled():
        task.exception()
