"""Work that goes on beside a block of code and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, object], name: str) -> AsyncIterator[None]:
    """Run ``work`` while the block lasts, then cancel it and wait until it has ended.

    If ``work`` fails, the block is cancelled and the failure raised in its place: nothing runs on half alive. An error
    out of the block itself passes as it is, not as an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work, name=name)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as failures:
        first, *others = failures.exceptions
        if others:
            raise
        raise first from first.__cause__
