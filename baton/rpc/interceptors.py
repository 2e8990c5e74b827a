"""What happens around every call of a server: request id, trace, service token, drain, metrics, typed errors.

One interceptor of our own instead of a stack of libraries': it is the same for unary and streaming calls, and it closes
a streaming handler in the same task when its client goes away.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.clock import Ids
from baton.core.errors import BatonError, Cancelled, InvalidRequest, QuotaExceeded, Unauthenticated
from baton.core.streams import closing
from baton.core.telemetry import Tracer, log_context
from baton.core.types import MAX_REQUEST_ID
from baton.rpc.calls import Calls
from baton.rpc.channels import AUTHORIZATION_KEY, REQUEST_ID_KEY, TRACEPARENT_KEY, bearer, same_secret
from baton.rpc.errors import being_cancelled, status_code, trailing_metadata, unexpected
from baton.rpc.rate_limits import refused_metadata, retry_metadata

HEALTH_SERVICE: Final = "grpc.health.v1.Health"

_log = logging.getLogger(__name__)

# gRPC hands us handlers of any service, so their messages and contexts have no narrower type here.
Handler = Any
Context = Any


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands for a request whose bytes are not a message of ``type_name``."""

    type_name: str
    cause: str


class CallInterceptor(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument]
    """``counted`` are the full names of the services whose calls are requests: drained and measured one by one.

    The others' (health, reflection, long-lived links) are only identified, authenticated and given typed errors. A call
    that is a request, or part of a caller's trace, has a span.
    """

    def __init__(self, calls: Calls, ids: Ids, token: str, counted: frozenset[str], tracer: Tracer) -> None:
        self._calls = calls
        self._ids = ids
        self._token = token
        self._counted = counted
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = str(handler_call_details.method).lstrip("/")
        return self._wrapped(handler, method)

    def _wrapped(self, handler: Handler, method: str) -> Handler:
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        readable = _readable_stream if handler.request_streaming else _readable

        async def unary(request: Any, context: Context) -> Any:
            async with self._around(method, context):
                return await inner(readable(request), context)

        async def stream(request: Any, context: Context) -> None:
            async with self._around(method, context):
                await _send_all(inner(readable(request), context), context)

        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        return make(
            stream if handler.response_streaming else unary,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    @asynccontextmanager
    async def _around(self, method: str, context: Context) -> AsyncIterator[None]:
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        request_id = str(metadata.get(REQUEST_ID_KEY, ""))[:MAX_REQUEST_ID] or self._ids.request_id()
        answer = ((REQUEST_ID_KEY, request_id),)
        context.set_trailing_metadata(answer)
        service, _, name = method.rpartition("/")
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(log_context(request_id=request_id, method=method))
                parent = str(metadata.get(TRACEPARENT_KEY, ""))
                if parent or service in self._counted:
                    stack.enter_context(self._tracer.span(method, parent=parent, request_id=request_id))
                if service in self._counted:
                    stack.enter_context(self._calls.measured(f"{service.rpartition('.')[2]}/{name}"))
                self._authenticate(service, metadata)
                if service in self._counted:
                    stack.enter_context(self._calls.admitted())
                yield
        except BatonError as error:
            await _abort(context, error, answer)
        except grpc.aio.AbortError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # the edge of the process: a bug must not travel as such
            if being_cancelled():
                raise
            await _abort(context, unexpected(error, request_id), answer)

    def _authenticate(self, service: str, metadata: dict[str, Any]) -> None:
        """Refuse callers without the services' token. Health stays open: an orchestrator has no secrets."""
        if not self._token or service == HEALTH_SERVICE:
            return
        if not same_secret(str(metadata.get(AUTHORIZATION_KEY, "")), bearer(self._token)):
            raise Unauthenticated("authorization: the services' shared token is missing or wrong")


_grpc: Any = grpc
_MAKERS: Final[dict[tuple[bool, bool], Callable[..., Handler]]] = {
    (False, False): _grpc.unary_unary_rpc_method_handler,
    (False, True): _grpc.unary_stream_rpc_method_handler,
    (True, False): _grpc.stream_unary_rpc_method_handler,
    (True, True): _grpc.stream_stream_rpc_method_handler,
}


async def _abort(context: Context, error: BatonError, answer: tuple[tuple[str, str], ...]) -> None:
    left = refused_metadata(error.refusals) if isinstance(error, QuotaExceeded) else ()
    retry = retry_metadata(getattr(error, "retry_after", None))
    await context.abort(status_code(error), error.message[:1024], (*answer, *left, *retry, *trailing_metadata(error)))


async def _send_all(produced: Any, context: Context) -> None:
    """Send what a streaming handler yields; one of the other kind, a coroutine, sends by itself."""
    if inspect.isawaitable(produced):
        await produced
        return
    async with closing(produced) as messages:
        async for message in messages:
            await send(message, context)


async def send(message: Any, context: Context) -> None:
    """Returns when the transport took the message. Cancelled when the caller is gone and gRPC has not told us yet."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise Cancelled("the caller is gone") from error


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC would answer INTERNAL to bytes that are not a message; the caller should learn what was wrong."""
    if deserialize is None:
        return None
    owner = getattr(deserialize, "__self__", None)
    descriptor = getattr(owner, "DESCRIPTOR", None)
    type_name = getattr(descriptor, "full_name", "the message")

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return Undecodable(type_name, str(error))

    return read


def _readable(request: Any) -> Any:
    if isinstance(request, Undecodable):
        _log.warning("undecodable message", extra={"type": request.type_name, "cause": request.cause})
        raise InvalidRequest(f"cannot decode {request.type_name}: {request.cause}", field=request.type_name)
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)
