"""The asyncio client of the gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle
from types import TracebackType
from typing import Self, Unpack

from baton.client.answer import Answer, collect
from baton.client.options import Options, build_request
from baton.client.resume import HeldAnswer, ResumePolicy
from baton.core.clock import Clock, Ids, RandomIds, SystemClock
from baton.core.deadline import Deadline
from baton.core.errors import Expired, InvalidRequest, Overloaded, PeerUnavailable
from baton.core.streams import closing
from baton.core.types import ChatMessage, GenerateChunk, GenerateRequest, ModelInfo
from baton.rpc.channels import ChannelPool, ClientSecurity, ClientTls
from baton.rpc.gateway import GatewayClient

log = logging.getLogger(__name__)
DEFAULT_RESUME = ResumePolicy()
LONGEST_TIMEOUT = 365 * 24 * 3600.0


class Client:
    """One caller's view of the gateways at ``address``: one ``host:port``, or several that are equals.

    A lost connection is hidden: the request goes on, at the next address if there are several, and the caller sees each
    token once. Every method raises the typed errors of ``baton.core.errors`` and nothing else. Leaving a stream early
    (``aclosing``, or cancelling the task that reads it) cancels the request.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        key: str,
        tls: ClientTls | None = None,
        *,
        resume: ResumePolicy = DEFAULT_RESUME,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        self._addresses = cycle([address] if isinstance(address, str) else list(address))
        self._address = next(self._addresses)
        self._channels = ChannelPool(ClientSecurity(token=key, tls=tls))
        self._resume = resume
        self._clock = clock or SystemClock()
        self._ids = ids or RandomIds()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channels.aclose()

    # --- streams ----------------------------------------------------------------------------------------------------

    def generate(
        self, *, text: str | None = None, prompt_token_ids: Sequence[int] | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Continue a text, or token ids."""
        return self.stream(build_request(text=text, prompt_token_ids=prompt_token_ids, **options))

    def chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> AsyncGenerator[GenerateChunk, None]:
        """Answer a conversation."""
        return self.stream(build_request(messages=messages, **options))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The chunks of all choices as they come, until each had its last."""
        if request.timeout is not None and not 0 < request.timeout <= LONGEST_TIMEOUT:
            limit = f"must be above 0 and at most {LONGEST_TIMEOUT:.0f} seconds"
            raise InvalidRequest.out_of_range("timeout", request.timeout, limit)
        deadline = Deadline.after(request.timeout)
        request = replace(request, request_id=request.request_id or self._ids.request_id())
        held = HeldAnswer(request)
        failures = 0
        while not held.complete:
            address = self._address
            try:
                async with aclosing(self._rest(address, held, deadline)) as chunks:
                    async for chunk in chunks:
                        failures = 0
                        yield chunk
            except (PeerUnavailable, Overloaded) as error:
                failures += 1
                self._check(held, failures, error)
                if address == self._address:  # else another request that was lost with this one has turned already
                    self._address = next(self._addresses)
                log.info("resuming", extra={"request_id": request.request_id, "cause": error.message})
                await deadline.within(self._clock.sleep(self._resume.pause(failures)), "the gateway to come back")

    async def _rest(self, address: str, held: HeldAnswer, deadline: Deadline) -> AsyncGenerator[GenerateChunk, None]:
        """What one call brings of the answer that is not held yet."""
        async with closing(self._door(address).generate(held.rest(_left(deadline)))) as chunks:
            async for chunk in chunks:
                if (new := held.take(chunk)) is not None:
                    yield new
        if not held.complete:
            raise PeerUnavailable(f"{address} ended the stream before the answer was complete")

    # --- whole answers ----------------------------------------------------------------------------------------------

    async def complete(
        self, *, text: str | None = None, prompt_token_ids: Sequence[int] | None = None, **options: Unpack[Options]
    ) -> Answer:
        """``generate``, read to its end."""
        return await self.ask(build_request(text=text, prompt_token_ids=prompt_token_ids, **options))

    async def complete_chat(self, messages: Sequence[ChatMessage], **options: Unpack[Options]) -> Answer:
        """``chat``, read to its end."""
        return await self.ask(build_request(messages=messages, **options))

    async def ask(self, request: GenerateRequest) -> Answer:
        """``stream``, read to its end."""
        async with aclosing(self.stream(request)) as chunks:
            return await collect(chunks, request.n)

    # --- questions about models -------------------------------------------------------------------------------------

    async def count_tokens(
        self,
        *,
        text: str | None = None,
        messages: Sequence[ChatMessage] | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids that ``text`` or ``messages`` would be as a prompt; count them."""
        spoken = None if messages is None else tuple(messages)
        return await self._door().count_tokens(
            GenerateRequest(model=model, text=text, messages=spoken, timeout=timeout)
        )

    async def models(self, timeout: float | None = None) -> Sequence[ModelInfo]:
        """The models that this key may use."""
        return await self._door().list_models(timeout)

    async def model(self, name: str = "", timeout: float | None = None) -> ModelInfo:
        """What is known of one model; without a name, of the one that answers requests without a name."""
        return await self._door().get_model(name, timeout)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _door(self, address: str = "") -> GatewayClient:
        """``address`` empty: the one in use."""
        return GatewayClient(self._channels.get(address or self._address))

    def _check(self, held: HeldAnswer, failures: int, error: PeerUnavailable | Overloaded) -> None:
        """Raise ``error`` when going on is not worth trying.

        Overloaded before the first chunk is an answer, and when to come back is the caller's choice.
        """
        allowed = (
            self._resume.attempts if held.started else min(self._resume.attempts, self._resume.attempts_unanswered)
        )
        if failures > allowed or (isinstance(error, Overloaded) and not held.started):
            raise error


def _left(deadline: Deadline) -> float | None:
    remaining = deadline.remaining()
    if remaining == 0:
        raise Expired("deadline passed before the answer was complete")
    return remaining
