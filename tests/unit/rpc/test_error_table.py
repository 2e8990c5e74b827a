from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.core import errors
from baton.core.errors import BatonError
from baton.rpc.errors import from_detail, from_rpc_error, is_bare, status_code, to_detail, trailing_metadata
from protos.baton.v1 import types_pb2


def rpc_error(
    code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, None)


def status_of(error: BatonError) -> status_pb2.Status:
    ((_, raw),) = trailing_metadata(error)
    return status_pb2.Status.FromString(raw)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.TokenizerMissing, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
        (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
        (errors.UnknownModel, grpc.StatusCode.NOT_FOUND),
        (errors.NotFound, grpc.StatusCode.NOT_FOUND),
        (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
        (errors.QuotaExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Overloaded, grpc.StatusCode.UNAVAILABLE),
        (errors.PeerUnavailable, grpc.StatusCode.UNAVAILABLE),
        (errors.TransferRejected, grpc.StatusCode.ABORTED),
        (errors.Conflict, grpc.StatusCode.ABORTED),
        (errors.CorruptTransfer, grpc.StatusCode.DATA_LOSS),
        (errors.Expired, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.Cancelled, grpc.StatusCode.CANCELLED),
        (BatonError, grpc.StatusCode.INTERNAL),
    ],
)
def test_each_class_has_its_status(kind: type[BatonError], code: grpc.StatusCode) -> None:
    assert status_code(kind("x")) is code


def test_generic_clients_find_the_standard_details() -> None:
    details = {part.TypeName(): part for part in status_of(errors.Overloaded("full", retry_after=1.5)).details}
    retry = error_details_pb2.RetryInfo()
    assert details["google.rpc.RetryInfo"].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
    info = error_details_pb2.ErrorInfo()
    assert details["google.rpc.ErrorInfo"].Unpack(info)
    assert (info.reason, info.domain) == ("OVERLOADED", "baton")

    names = {part.TypeName() for part in status_of(errors.QuotaExceeded("limit")).details}
    assert names == {"google.rpc.ErrorInfo", "google.rpc.QuotaFailure"}
    names = {part.TypeName() for part in status_of(errors.InvalidRequest("bad", field="top_p")).details}
    assert names == {"google.rpc.ErrorInfo", "google.rpc.BadRequest"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerUnavailable),
        (grpc.StatusCode.CANCELLED, errors.PeerUnavailable),
        (grpc.StatusCode.UNKNOWN, errors.PeerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Expired),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.INTERNAL, BatonError),
        (grpc.StatusCode.UNIMPLEMENTED, BatonError),
    ],
)
def test_a_bare_status_is_understood_and_names_the_peer(code: grpc.StatusCode, kind: type[BatonError]) -> None:
    bare = rpc_error(code, "details of it")
    assert is_bare(bare)
    error = from_rpc_error(bare, "decode-0")
    assert type(error) is kind
    assert "decode-0" in error.message
    assert "details of it" in error.message


def test_details_of_somebody_else_are_not_taken_for_ours() -> None:
    foreign = status_pb2.Status(code=14, message="theirs")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="example.com"))
    for raw in (foreign.SerializeToString(), b"\xff\xff\xff", b""):
        error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", (("grpc-status-details-bin", raw),)), "p")
        assert type(error) is errors.PeerUnavailable


def test_a_newer_peers_error_is_understood_by_its_status() -> None:
    class Newer(errors.PeerUnavailable):
        reason = "SOMETHING_NEWER"

    metadata = trailing_metadata(Newer("from the future"))
    Newer.reason = "FORGOTTEN"
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "", metadata), "p")
    assert type(error) is errors.PeerUnavailable
    assert error.message == "from the future"


def test_each_detail_makes_a_new_error() -> None:
    detail = to_detail(errors.Overloaded("full", retry_after=2.0))
    first, second = from_detail(detail), from_detail(detail)
    assert first is not second
    assert isinstance(first, errors.Overloaded)
    assert first.retry_after == 2.0


def test_an_unknown_reason_in_a_stream_is_a_plain_error() -> None:
    error = from_detail(types_pb2.ErrorDetail(reason="WHATEVER", message="m"))
    assert type(error) is BatonError
    assert error.message == "m"


@pytest.mark.parametrize("hint", ["nan", "inf", "-inf", "-5.0", "1e300", "soon", ""])
def test_a_hint_that_makes_no_sense_is_dropped_and_the_error_can_be_passed_on(hint: str) -> None:
    """Whoever passes it on rounds it for clients."""
    info = error_details_pb2.ErrorInfo(reason="BUSY", domain="baton", metadata={"retry_after_seconds": hint})
    status = status_pb2.Status(code=14, message="full")
    status.details.add().Pack(info)
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    found = [from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, trailing=trailing), "p")]
    if hint not in ("soon", ""):
        found.append(from_detail(types_pb2.ErrorDetail(reason="BUSY", retry_after_seconds=float(hint))))
    for error in found:
        assert isinstance(error, errors.Busy)
        assert error.retry_after == errors.Busy("").retry_after
        assert trailing_metadata(error)
