"""Chunks of one request between the link's reader, which never waits, and their consumer, which may.

A consumer that is behind is given all the tokens that wait for it at once: a gateway with too many streams then sends
fewer and larger messages, instead of falling behind further and further.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.types import TokenChunk


class ChunkBuffer:
    """Holds at most ``limit`` chunks. One consumer."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._chunks: deque[TokenChunk] = deque()
        self._closed = False
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taken_at = clock.now()

    def put(self, chunk: TokenChunk) -> bool:
        """False: the buffer is full."""
        if len(self._chunks) >= self._limit:
            return False
        if not self._chunks:
            self._taken_at = self._clock.now()  # from now on it waits for the consumer
        self._chunks.append(chunk)
        self._wake()
        return True

    def close(self, error: BatonError | None) -> None:
        """Nothing more comes. The consumer gets what is here, then the end or ``error``. Only the first call counts."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._wake()

    def drop(self, error: BatonError) -> None:
        """Close and forget what is here."""
        self._chunks.clear()
        self.close(error)

    def idle(self, now: float) -> float:
        """Seconds for which chunks have waited without any being taken; 0 when none waits."""
        return now - self._taken_at if self._chunks else 0.0

    async def get(self) -> TokenChunk | None:
        """The next chunk, with the tokens of those behind it that have nothing else to say; None at the end. Raises the
        error that the stream was closed with."""
        while not self._chunks:
            if self._closed and self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._taken_at = self._clock.now()
        first = self._chunks.popleft()
        return self._with_followers(first) if self._chunks and first.finish is None else first

    def _with_followers(self, first: TokenChunk) -> TokenChunk:
        token_ids, logprobs = list(first.token_ids), list(first.logprobs)
        while self._chunks and _is_plain(self._chunks[0]):
            chunk = self._chunks.popleft()
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
        return replace(first, token_ids=tuple(token_ids), logprobs=tuple(logprobs))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_plain(chunk: TokenChunk) -> bool:
    """Tokens and their log-probabilities, and nothing else."""
    return chunk.finish is None and chunk.usage is None and chunk.placement is None and not chunk.prompt_logprobs
