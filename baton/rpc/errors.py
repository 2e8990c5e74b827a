"""The one table between our errors and gRPC: status codes out, rich details both ways.

A typed error travels as google.rpc details: ErrorInfo (reason, and the field in its metadata), RetryInfo, QuotaFailure,
BadRequest. Inside a stream that goes on it travels as ``ErrorDetail``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from baton.core import errors
from baton.core.errors import BatonError
from baton.core.types import QuotaRefusal
from baton.rpc.quota_failure import quota_failure, refusals_of
from protos.baton.v1 import types_pb2

DOMAIN: Final = "baton"
DETAILS_KEY: Final = "grpc-status-details-bin"
MAX_TEXT: Final = 1024  # characters of a message or field: a peer accepts only some kilobytes of trailing metadata

MAX_RETRY_SECONDS: Final = 366 * 86400.0  # no limit of ours lasts longer; what is more is no hint of a peer's

_CODES: Final[dict[type[BatonError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Overloaded: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StateUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.TransferRejected: grpc.StatusCode.ABORTED,
    errors.CorruptTransfer: grpc.StatusCode.DATA_LOSS,
    errors.Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    BatonError: grpc.StatusCode.INTERNAL,
}

# What a bare status means: gRPC itself made it, or a peer that does not speak our details.
_BARE: Final[dict[grpc.StatusCode, type[BatonError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: errors.UnknownModel,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.InvalidRequest,  # a message over the receive limit
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    grpc.StatusCode.CANCELLED: errors.PeerUnavailable,  # the peer stopped while it worked for us
    grpc.StatusCode.UNKNOWN: errors.PeerUnavailable,  # our servers never send it: the stream broke
    grpc.StatusCode.ABORTED: errors.TransferRejected,
    grpc.StatusCode.DATA_LOSS: errors.CorruptTransfer,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Expired,
}

_log = logging.getLogger(__name__)


def status_code(error: BatonError) -> grpc.StatusCode:
    """The gRPC status of ``error``'s class or of its nearest ancestor."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def unexpected(error: BaseException, request_id: str) -> BatonError:
    """Log a bug once, with its traceback, and make the error that its caller may see."""
    _log.error("unexpected error", exc_info=error, extra={"request_id": request_id})
    return BatonError(f"internal error, logged with request id {request_id}")


def being_cancelled() -> bool:
    """Whether somebody cancelled the running task.

    False tells a stray CancelledError (of a call or task inside; gRPC and asyncio report both alike) from a real one.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- inside a stream --------------------------------------------------------------------------------------------------


def to_detail(error: BatonError) -> types_pb2.ErrorDetail:
    detail = types_pb2.ErrorDetail(
        reason=error.reason, message=error.message[:MAX_TEXT], field=getattr(error, "field", "")[:MAX_TEXT]
    )
    retry_after: float | None = getattr(error, "retry_after", None)
    if retry_after is not None:
        detail.retry_after_seconds = retry_after
    return detail


def from_detail(detail: types_pb2.ErrorDetail) -> BatonError:
    """A new error of the class that ``detail`` names; ``BatonError`` when a newer peer made up the reason."""
    return _build(errors.by_reason(detail.reason), detail)


def _build(
    kind: type[BatonError], detail: types_pb2.ErrorDetail, refusals: tuple[QuotaRefusal, ...] = ()
) -> BatonError:
    said = detail.retry_after_seconds if detail.HasField("retry_after_seconds") else None
    retry_after = said if said is not None and 0 <= said <= MAX_RETRY_SECONDS else None  # NaN is not, either
    if issubclass(kind, errors.InvalidRequest):
        return kind(detail.message, field=detail.field)
    if issubclass(kind, errors.QuotaExceeded):
        return kind(detail.message, retry_after=retry_after, refusals=refusals)
    if issubclass(kind, errors.Overloaded) and retry_after is not None:
        return kind(detail.message, retry_after=retry_after)
    return kind(detail.message)


# --- as the end of a call ---------------------------------------------------------------------------------------------


def trailing_metadata(error: BatonError) -> tuple[tuple[str, bytes], ...]:
    """The rich details of ``error``, as the trailing metadata in which google.rpc puts them."""
    detail = to_detail(error)
    code, _name = status_code(error).value
    status = status_pb2.Status(code=code, message=detail.message)
    info = error_details_pb2.ErrorInfo(reason=detail.reason, domain=DOMAIN)
    rich: list[Message] = [info]
    if detail.field:
        info.metadata["field"] = detail.field
        violation = error_details_pb2.BadRequest.FieldViolation(field=detail.field, description=detail.message)
        rich.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QuotaExceeded):
        rich.append(quota_failure(error))
    if detail.HasField("retry_after_seconds"):
        # RetryInfo is what generic clients read; it counts nanoseconds, so the exact figure rides in the metadata.
        info.metadata["retry_after_seconds"] = repr(detail.retry_after_seconds)
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(detail.retry_after_seconds * 1e9)))
        rich.append(retry)
    for message in rich:
        status.details.append(_packed(message))
    return ((DETAILS_KEY, status.SerializeToString()),)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> BatonError:
    """The typed error that a call to ``peer`` ended with."""
    code: grpc.StatusCode = error.code()
    rich = _rich_details(error)
    if rich is None:
        kind = _BARE.get(code, BatonError)
        return kind(f"{peer}: {code.name}: {error.details() or 'no details'}")
    detail, failure = rich
    kind = errors.by_reason(detail.reason)
    if kind is BatonError and detail.reason != BatonError.reason:
        kind = _BARE.get(code, BatonError)  # a newer peer's class: its status is the nearest that we know
    return _build(kind, detail, refusals_of(failure))


def is_bare(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC itself ended the call, not the peer's code."""
    return _rich_details(error) is None


def _rich_details(
    error: grpc.aio.AioRpcError,
) -> tuple[types_pb2.ErrorDetail, error_details_pb2.QuotaFailure] | None:
    """Our details in the trailing metadata, or None: gRPC itself ended the call, or not a peer of ours."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    raw = next((value for key, value in metadata if key == DETAILS_KEY), None)
    if not isinstance(raw, bytes):
        return None
    status = status_pb2.Status()
    info, failure = error_details_pb2.ErrorInfo(), error_details_pb2.QuotaFailure()
    try:
        status.ParseFromString(raw)
        found = any(part.Unpack(info) for part in status.details)
        any(part.Unpack(failure) for part in status.details)
    except DecodeError:
        return None
    if not found or info.domain != DOMAIN or status.code == code_pb2.OK:
        return None
    detail = types_pb2.ErrorDetail(reason=info.reason, message=status.message, field=info.metadata.get("field", ""))
    if "retry_after_seconds" in info.metadata:
        with suppress(ValueError):  # a hint that is none
            detail.retry_after_seconds = float(info.metadata["retry_after_seconds"])
    return detail, failure
