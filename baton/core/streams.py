"""Consuming a stream that somebody else produces, without leaving it half open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class closing(Generic[T]):
    """``contextlib.aclosing`` for the protocols of ``baton.core.api``, which promise no more than an iterator.

    A stream without ``aclose`` owns nothing and is left alone.
    """

    def __init__(self, stream: AsyncIterator[T]) -> None:
        self._stream = stream

    async def __aenter__(self) -> AsyncIterator[T]:
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        stream = self._stream
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
