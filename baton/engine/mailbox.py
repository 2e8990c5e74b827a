"""A queue from one reader task to one consumer, which ends or fails in order. For one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """``put`` never waits; ``get`` gives items in order, then raises what ``fail`` said.

    With ``limit`` only the newest items are kept; without, the writer's own bound holds (an engine answers a request
    with at most max_tokens chunks).
    """

    def __init__(self, limit: int | None = None) -> None:
        self._items: deque[Item] = deque(maxlen=limit)
        self._failure: Exception | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come; the first error counts."""
        if self._failure is None and not self._closed:
            self._failure = error
            self._wake()

    def close(self) -> None:
        """Nothing more will come, and that is well."""
        if self._failure is None:
            self._closed = True
            self._wake()

    async def get(self) -> Item:
        if await self._has_next():
            return self._items.popleft()
        raise AssertionError("a mailbox was read past its end")

    async def stream(self) -> AsyncGenerator[Item, None]:
        """The items until ``close``."""
        while await self._has_next():
            yield self._items.popleft()

    async def _has_next(self) -> bool:
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                return False
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
