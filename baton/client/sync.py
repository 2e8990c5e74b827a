"""The client for code without an event loop: each call waits; streams are plain iterators."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from baton.client.answer import Answer
from baton.client.client import DEFAULT_RESUME, Client
from baton.client.options import Options, build_request
from baton.client.resume import ResumePolicy
from baton.core.types import ChatMessage, GenerateChunk, GenerateRequest, ModelInfo
from baton.rpc.channels import ClientTls

T = TypeVar("T")


class SyncClient:
    """``Client`` behind a thread of its own. Use in a ``with`` block; safe to call from several threads.

    Leaving a stream's loop early cancels the request when the iterator is closed or collected.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        key: str,
        tls: ClientTls | None = None,
        *,
        resume: ResumePolicy = DEFAULT_RESUME,
    ) -> None:
        self._client = Client(address, key, tls, resume=resume)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(self._client.__aexit__(kind, error, trace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self, *, text: str | None = None, prompt_token_ids: Sequence[int] | None = None, **options: Unpack[Options]
    ) -> Generator[GenerateChunk, None, None]:
        return self.stream(build_request(text=text, prompt_token_ids=prompt_token_ids, **options))

    def chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> Generator[GenerateChunk, None, None]:
        return self.stream(build_request(messages=messages, **options))

    def stream(self, request: GenerateRequest) -> Generator[GenerateChunk, None, None]:
        chunks = self._client.stream(request)
        try:
            while (chunk := self._wait(_next(chunks))) is not None:
                yield chunk
        finally:
            self._wait(_close(chunks))

    def complete(
        self, *, text: str | None = None, prompt_token_ids: Sequence[int] | None = None, **options: Unpack[Options]
    ) -> Answer:
        return self._wait(self._client.complete(text=text, prompt_token_ids=prompt_token_ids, **options))

    def complete_chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> Answer:
        return self._wait(self._client.complete_chat(messages, **options))

    def ask(self, request: GenerateRequest) -> Answer:
        return self._wait(self._client.ask(request))

    def count_tokens(
        self,
        *,
        text: str | None = None,
        messages: Sequence[ChatMessage] | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        return self._wait(self._client.count_tokens(text=text, messages=messages, model=model, timeout=timeout))

    def models(self, timeout: float | None = None) -> Sequence[ModelInfo]:
        return self._wait(self._client.models(timeout))

    def model(self, name: str = "", timeout: float | None = None) -> ModelInfo:
        return self._wait(self._client.model(name, timeout))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` on the client's loop; an interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


async def _next(chunks: AsyncGenerator[GenerateChunk, None]) -> GenerateChunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[GenerateChunk, None]) -> None:
    await chunks.aclose()
