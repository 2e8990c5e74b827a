"""The asyncio client of the gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, Unpack

from baton.client.answer import Answer, collect
from baton.client.options import Options, build_request
from baton.client.resume import HeldAnswer, ResumePolicy
from baton.core.address import check_address
from baton.core.clock import Clock, Ids, RandomIds, SystemClock
from baton.core.deadline import Deadline
from baton.core.errors import (
    BatonError,
    Draining,
    Expired,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    StateUnavailable,
)
from baton.core.streams import closing
from baton.core.types import ChatMessage, GenerateChunk, GenerateRequest, ModelInfo
from baton.rpc.channels import ChannelPool, ClientSecurity, ClientTls
from baton.rpc.gateway import GatewayClient

log = logging.getLogger(__name__)
DEFAULT_RESUME = ResumePolicy()
LONGEST_TIMEOUT = 365 * 24 * 3600.0
GATEWAY_AWAY = (PeerUnavailable, Draining, StateUnavailable)  # of this gateway: another one may well answer

T = TypeVar("T")


class Client:
    """One caller's view of the gateways at ``address``: one ``host:port``, or several that are equals.

    A gateway that is gone, ends or is cut off is hidden: the request goes on, at the next address if there are several,
    under the same request id, so that it is charged once, and the caller sees each token once. Every method raises the
    typed errors of ``baton.core.errors`` and nothing else. Leaving a stream early (``aclosing``, or cancelling the task
    that reads it) cancels the request.
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
        """InvalidRequest without an address, and for one that is no ``host:port``."""
        self._addresses = (address,) if isinstance(address, str) else tuple(dict.fromkeys(address))
        if not self._addresses:
            raise InvalidRequest.out_of_range("address", address, "must be one host:port or several")
        for each in self._addresses:
            check_address("address", each)
        self._address = self._addresses[0]
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
            except (*GATEWAY_AWAY, Overloaded) as error:
                failures += 1
                pause = self._pause(held, failures, error)
                self._leave(address)
                log.info("resuming", extra={"request_id": request.request_id, "cause": error.message})
                await deadline.within(self._clock.sleep(pause), "a gateway to come back")

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
        asked = GenerateRequest(model=model, text=text, messages=spoken)
        return await self._answer(lambda door, left: door.count_tokens(replace(asked, timeout=left)), timeout)

    async def models(self, timeout: float | None = None) -> Sequence[ModelInfo]:
        """The models that this key may use."""
        return await self._answer(lambda door, left: door.list_models(left), timeout)

    async def model(self, name: str = "", timeout: float | None = None) -> ModelInfo:
        """What is known of one model; without a name, of the one that answers requests without a name."""
        return await self._answer(lambda door, left: door.get_model(name, left), timeout)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _answer(self, ask: Callable[[GatewayClient, float | None], Awaitable[T]], timeout: float | None) -> T:
        """Of the first gateway that is there; each is asked once. ``ask`` gets the seconds that are left."""
        deadline = Deadline.after(timeout)
        for _ in self._addresses[1:]:
            address = self._address
            try:
                return await ask(self._door(address), _left(deadline))
            except GATEWAY_AWAY:
                self._leave(address)
        return await ask(self._door(self._address), _left(deadline))

    def _door(self, address: str) -> GatewayClient:
        return GatewayClient(self._channels.get(address))

    def _leave(self, address: str) -> None:
        """Turn to the next address, unless another request has done so."""
        if self._address == address:
            at = self._addresses.index(address)
            self._address = self._addresses[(at + 1) % len(self._addresses)]

    def _pause(self, held: HeldAnswer, failures: int, error: BatonError) -> float:
        """Seconds to wait before going on. Raises ``error`` when that is not worth trying.

        Overloaded before the first chunk is an answer, and when to come back is the caller's choice.
        """
        pause = self._resume.pause(failures, len(self._addresses) - 1, started=held.started)
        if pause is None or not (held.started or isinstance(error, GATEWAY_AWAY)):
            raise error
        return pause


def _left(deadline: Deadline) -> float | None:
    remaining = deadline.remaining()
    if remaining == 0:
        raise Expired("deadline passed before the answer was complete")
    return remaining
