"""admin.proto: quotas as they stand, refusals, usage and the audit log."""

from __future__ import annotations

from baton.core.resource_names import parse_resource_name
from baton.core.types import (
    AuditEntry,
    LedgerEntry,
    LedgerReason,
    Level,
    Metric,
    QuotaAlert,
    QuotaBalance,
    QuotaRefusal,
    RefusalNote,
    UsageGroup,
    UsageQuery,
    UsageSum,
)
from baton.rpc.wire.guard import encodes, require, unknown_value
from baton.rpc.wire.records import enum_from_wire, enum_name, time_from_wire, time_to_wire
from protos.baton.v1 import admin_pb2 as pb

_MICROSECONDS = 10**6
_Limited = pb.QuotaBalance | pb.QuotaRefusal | pb.QuotaAlert


_LEVELS = {
    Level.ORGANISATION: pb.QUOTA_LEVEL_ORGANIZATION,
    Level.TENANT: pb.QUOTA_LEVEL_TENANT,
    Level.KEY: pb.QUOTA_LEVEL_KEY,
}


def _level(message: _Limited) -> Level:
    found = next((level for level, number in _LEVELS.items() if number == message.level), None)
    if found is None:
        raise unknown_value(message, "level", message.level)
    return found


def _metric(message: _Limited) -> Metric:
    require(message, "metric")
    return enum_from_wire(message, "metric", message.metric, pb.QuotaMetric, Metric) or Metric.CONCURRENCY


# --- quotas -----------------------------------------------------------------------------------------------------------


def balance_to_wire(balance: QuotaBalance) -> pb.QuotaBalance:
    return pb.QuotaBalance(
        level=_LEVELS[balance.level],
        subject=balance.subject,
        model=balance.model,
        metric=enum_name("QUOTA_METRIC", balance.metric),
        limit=balance.limit,
        used=balance.used,
        reserved=balance.reserved,
        resets_after_seconds=balance.resets_after,
    )


def balance_from_wire(message: pb.QuotaBalance) -> QuotaBalance:
    return QuotaBalance(
        level=_level(message),
        subject=message.subject,
        model=message.model,
        metric=_metric(message),
        limit=message.limit if message.HasField("limit") else None,
        used=message.used,
        reserved=message.reserved,
        resets_after=message.resets_after_seconds if message.HasField("resets_after_seconds") else None,
    )


def refusal_to_wire(refusal: QuotaRefusal) -> pb.QuotaRefusal:
    return pb.QuotaRefusal(
        level=_LEVELS[refusal.level],
        subject=refusal.subject,
        model=refusal.model,
        metric=enum_name("QUOTA_METRIC", refusal.metric),
        limit=refusal.limit,
        used=refusal.used,
        reserved=refusal.reserved,
        requested=refusal.requested,
        retry_after_seconds=refusal.retry_after,
    )


def refusal_from_wire(message: pb.QuotaRefusal) -> QuotaRefusal:
    return QuotaRefusal(
        level=_level(message),
        subject=message.subject,
        model=message.model,
        metric=_metric(message),
        limit=message.limit,
        used=message.used,
        reserved=message.reserved,
        requested=message.requested,
        retry_after=message.retry_after_seconds if message.HasField("retry_after_seconds") else None,
    )


def note_to_wire(note: RefusalNote) -> pb.ExplainRefusalResponse:
    return pb.ExplainRefusalResponse(
        request_id=note.request_id,
        time=time_to_wire(note.at),
        tenant=note.tenant,
        key_id=note.key_id,
        model=note.model,
        input_tokens=note.input_tokens,
        output_tokens=note.output_tokens,
        refusals=map(refusal_to_wire, note.refusals),
    )


def note_from_wire(message: pb.ExplainRefusalResponse) -> RefusalNote:
    return RefusalNote(
        request_id=message.request_id,
        at=time_from_wire(message, "time"),
        tenant=message.tenant,
        key_id=message.key_id,
        model=message.model,
        input_tokens=message.input_tokens,
        output_tokens=message.output_tokens,
        refusals=tuple(map(refusal_from_wire, message.refusals)),
    )


def alert_to_wire(alert: QuotaAlert) -> pb.QuotaAlert:
    return pb.QuotaAlert(
        level=_LEVELS[alert.level],
        subject=alert.subject,
        model=alert.model,
        metric=enum_name("QUOTA_METRIC", alert.metric),
        window_start=time_to_wire(alert.window_start / _MICROSECONDS),
        percent=alert.percent,
        limit=alert.limit,
        used=alert.used,
        id=alert.id,
        time=time_to_wire(alert.at),
    )


def alert_from_wire(message: pb.QuotaAlert) -> QuotaAlert:
    return QuotaAlert(
        level=_level(message),
        subject=message.subject,
        model=message.model,
        metric=_metric(message),
        window_start=message.window_start.ToMicroseconds(),
        percent=message.percent,
        limit=message.limit,
        used=message.used,
        id=message.id,
    )


# --- usage ------------------------------------------------------------------------------------------------------------


@encodes("UsageFilter")
def filter_to_wire(query: UsageQuery) -> pb.UsageFilter:
    start, end = time_to_wire(query.start), time_to_wire(query.end)
    return pb.UsageFilter(parent=str(query.parent), start_time=start, end_time=end, model=query.model)


def filter_from_wire(message: pb.UsageFilter) -> UsageQuery:
    require(message, "end_time")
    parent = parse_resource_name("parent", message.parent)
    return UsageQuery(parent, time_from_wire(message, "start_time"), time_from_wire(message, "end_time"), message.model)


def group_from_wire(request: pb.QueryUsageRequest) -> UsageGroup:
    return enum_from_wire(request, "group", request.group, pb.UsageGroup, UsageGroup) or UsageGroup.TENANT


def sum_to_wire(usage: UsageSum) -> pb.UsageSum:
    return pb.UsageSum(
        subject=usage.subject,
        requests=usage.requests,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        cost=usage.cost,
        energy_millijoules=usage.energy_millijoules,
    )


def sum_from_wire(message: pb.UsageSum) -> UsageSum:
    return UsageSum(
        subject=message.subject,
        requests=message.requests,
        input_tokens=message.input_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        cost=message.cost,
        energy_millijoules=message.energy_millijoules,
    )


def entry_to_wire(entry: LedgerEntry) -> pb.UsageEntry:
    return pb.UsageEntry(
        id=entry.id,
        admit_time=time_to_wire(entry.debited_at / _MICROSECONDS),
        reason=enum_name("CHARGE_REASON", entry.reason),
        request_id=entry.request_id,
        tenant=entry.tenant,
        key_id=entry.key_id,
        model=entry.model,
        requests=entry.requests,
        input_tokens=entry.input_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=entry.output_tokens,
        cost=entry.cost,
        energy_millijoules=entry.energy_millijoules,
    )


def entry_from_wire(message: pb.UsageEntry) -> LedgerEntry:
    reason = enum_from_wire(message, "reason", message.reason, pb.ChargeReason, LedgerReason)
    return LedgerEntry(
        id=message.id,
        debited_at=message.admit_time.ToMicroseconds(),
        reason=reason or LedgerReason.SETTLED,
        request_id=message.request_id,
        tenant=message.tenant,
        key_id=message.key_id,
        model=message.model,
        requests=message.requests,
        input_tokens=message.input_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        cost=message.cost,
        energy_millijoules=message.energy_millijoules,
    )


# --- audit ------------------------------------------------------------------------------------------------------------


def audit_to_wire(entry: AuditEntry) -> pb.AuditEntry:
    return pb.AuditEntry(
        id=entry.id,
        time=time_to_wire(entry.at),
        actor=entry.actor,
        action=entry.action,
        resource=entry.resource,
        before=entry.before,
        after=entry.after,
        request_id=entry.request_id,
    )


def audit_from_wire(message: pb.AuditEntry) -> AuditEntry:
    return AuditEntry(
        id=message.id,
        at=time_from_wire(message, "time"),
        actor=message.actor,
        action=message.action,
        resource=message.resource,
        before=message.before,
        after=message.after,
        request_id=message.request_id,
    )
