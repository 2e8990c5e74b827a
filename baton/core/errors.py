"""Every error that Baton raises on purpose, in one tree.

``reason`` is the stable machine-readable name (ErrorInfo.reason on the wire); the message is for people and names the
field, the limit and the value. ``baton.rpc.errors`` holds the one table from these classes to gRPC status codes.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.types.quota import QuotaRefusal


class BatonError(Exception):
    """Base of all typed errors. Anything that is not one of these is a bug and travels as INTERNAL."""

    reason = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(BatonError):
    """The caller sent something wrong; sending it again cannot help."""

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def out_of_range(cls, field: str, value: object, limit: str) -> InvalidRequest:
        """``field`` holds ``value``, which breaks ``limit`` (say, "must be between 0 and 2")."""
        return cls(f"{field}: {limit}, got {value}", field=field)


class TokenizerMissing(InvalidRequest):
    """The model has no tokenizer: it takes and returns token ids only."""

    reason = "TOKENIZER_MISSING"


class ChatTemplateMissing(InvalidRequest):
    """The model has no chat template: it takes text or token ids, not messages."""

    reason = "CHAT_TEMPLATE_MISSING"


class Unauthenticated(BatonError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    reason = "PERMISSION_DENIED"


class UnknownModel(BatonError):
    reason = "UNKNOWN_MODEL"


class NotFound(BatonError):
    """There is no resource of this name, or none that the caller may know of."""

    reason = "NOT_FOUND"


class AlreadyExists(BatonError):
    """A resource of this name is there already."""

    reason = "ALREADY_EXISTS"


class QuotaExceeded(BatonError):
    """The tenant's limit, not our capacity. ``refusals``: every limit that the request would have broken."""

    reason = "QUOTA_EXCEEDED"

    def __init__(
        self, message: str, *, retry_after: float | None = None, refusals: tuple[QuotaRefusal, ...] = ()
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.refusals = refusals

    @classmethod
    def of(cls, refusals: Sequence[QuotaRefusal]) -> QuotaExceeded:
        """Explains the refusal that lasts longest: retrying earlier would only meet it again."""
        never = [refusal for refusal in refusals if refusal.retry_after is None]
        worst = never[0] if never else max(refusals, key=lambda refusal: refusal.retry_after or 0.0)
        return cls(str(worst), retry_after=worst.retry_after, refusals=tuple(refusals))


class Overloaded(BatonError):
    """Our capacity, not the tenant's limit. ``retry_after`` is in seconds."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Busy(Overloaded):
    """The prompt would have to wait for longer than its caller wants it to. ``retry_after``: seconds until it would be
    computed if it did wait."""

    reason = "BUSY"


class Draining(Overloaded):
    """This process is about to end and takes no new request; that says nothing of the capacity of others."""

    reason = "DRAINING"


class Conflict(BatonError):
    """Somebody else changed a record since its writer read it: read it again and decide anew."""

    reason = "CONFLICT"


class PeerUnavailable(BatonError):
    """A process that the request needed is gone, silent or unreachable."""

    reason = "PEER_UNAVAILABLE"


class TransferRejected(BatonError):
    """A KV transfer named a ticket, attempt, epoch or format that its receiver does not accept."""

    reason = "TRANSFER_REJECTED"


class TransportUnavailable(TransferRejected):
    """This way of moving KV does not work between these two workers, or not any more; another one may."""

    reason = "TRANSPORT_UNAVAILABLE"


class CorruptTransfer(BatonError):
    """KV bytes do not match their checksum, or do not stand for the tokens they claim."""

    reason = "CORRUPT_TRANSFER"


class Expired(BatonError):
    """The request's deadline passed."""

    reason = "EXPIRED"


class Cancelled(BatonError):
    """The caller cancelled. Never answers a live caller; it settles accounts and logs."""

    reason = "CANCELLED"


class ModelError(BatonError):
    """A model cannot be loaded: files missing, truncated, corrupt, or of an unsupported kind."""

    reason = "MODEL_ERROR"


class ConfigError(BatonError):
    """A configuration key or value is wrong; names section, key, value and where it came from."""

    reason = "CONFIG_ERROR"


class StateUnavailable(BatonError):
    """The shared state (Redis) did not answer within its budget."""

    reason = "STATE_UNAVAILABLE"


def _tree(base: type[BatonError]) -> dict[str, type[BatonError]]:
    found = {base.reason: base}
    for child in base.__subclasses__():
        found |= _tree(child)
    return found


def by_reason(reason: str) -> type[BatonError]:
    """The class whose ``reason`` this is; unknown reasons (a newer peer) map to ``BatonError``."""
    return _tree(BatonError).get(reason, BatonError)
