"""admin.proto: organisations, tenants and keys, and their limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from baton.core.errors import InvalidRequest
from baton.core.resource_names import parse_resource_name
from baton.core.types import (
    AdminRole,
    AwayPolicy,
    KeyRecord,
    Limits,
    Metric,
    ModelLimits,
    Organisation,
    RecordKind,
    RecordWarning,
    ResourceName,
    Tenant,
    Versioned,
)
from baton.rpc.wire.guard import Bounded, encodes, unknown_value
from baton.rpc.wire.types import tier_from_wire, tier_to_wire
from protos.baton.v1 import admin_pb2 as pb

E = TypeVar("E", bound=StrEnum)
INT64 = 2**63 - 1
UINT32 = 2**32 - 1
_LIMITS = tuple(metric.value for metric in Metric)


def enum_name(prefix: str, value: StrEnum) -> Any:
    """The wire's name of ``value``, which protobuf takes in place of its number."""
    return f"{prefix}_{value.name}"


def enum_from_wire(message: Message, field: str, value: int, names: Any, kind: type[E]) -> E | None:
    """None when it was not said; InvalidRequest for a number that this version does not know."""
    if value == 0:
        return None
    prefix: str = names.Name(0).removesuffix("UNSPECIFIED")
    try:
        return kind[names.Name(value).removeprefix(prefix)]
    except (ValueError, KeyError) as error:
        raise unknown_value(message, field, value) from error


def time_to_wire(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def time_from_wire(message: Message, field: str) -> float:
    """InvalidRequest for one that no calendar has: protobuf carries any."""
    stamp: Timestamp = getattr(message, field)
    try:
        return stamp.ToMicroseconds() / 1e6
    except ValueError as error:
        name = f"{message.DESCRIPTOR.name}.{field}"
        rule = "must be a time of the years 1 to 9999"
        raise InvalidRequest.out_of_range(name, f"{stamp.seconds} s, {stamp.nanos} ns", rule) from error


# --- limits -----------------------------------------------------------------------------------------------------------


def _bounds(limits: Limits) -> Iterable[Bounded]:
    for name in _LIMITS:
        if (value := limits.of(Metric(name))) is not None:
            yield Bounded(f"limits.{name}", value, -INT64 - 1, INT64)


@encodes("Limits", _bounds)
def limits_to_wire(limits: Limits) -> pb.Limits:
    values: dict[str, Any] = {name: limits.of(Metric(name)) for name in _LIMITS}
    return pb.Limits(shadow=[enum_name("QUOTA_METRIC", metric) for metric in sorted(limits.shadow)], **values)


def limits_from_wire(message: pb.Limits) -> Limits:
    values: dict[str, Any] = {name: getattr(message, name) for name in _LIMITS if message.HasField(name)}  # pyright: ignore
    shadow: set[Metric] = set()
    for number in message.shadow:
        metric = enum_from_wire(message, "shadow", number, pb.QuotaMetric, Metric)
        if metric is None:
            raise unknown_value(message, "shadow", number)
        shadow.add(metric)
    return Limits(shadow=frozenset(shadow), **values)


def _rules_to_wire(rules: Sequence[ModelLimits]) -> list[pb.ModelLimits]:
    return [pb.ModelLimits(model=rule.model, limits=limits_to_wire(rule.limits)) for rule in rules]


def _rules_from_wire(rules: Iterable[pb.ModelLimits]) -> tuple[ModelLimits, ...]:
    return tuple(ModelLimits(rule.model, limits_from_wire(rule.limits)) for rule in rules)


def _models_to_wire(models: tuple[str, ...] | None) -> pb.ModelList | None:
    return None if models is None else pb.ModelList(models=models)


def _models_from_wire(message: pb.Tenant | pb.Key) -> tuple[str, ...] | None:
    return tuple(message.models.models) if message.HasField("models") else None


# --- records ----------------------------------------------------------------------------------------------------------


@encodes("Organization")
def organisation_to_wire(record: Organisation, name: ResourceName, etag: str) -> pb.Organization:
    return pb.Organization(
        name=str(name),
        etag=etag,
        limits=limits_to_wire(record.limits),
        model_limits=_rules_to_wire(record.model_limits),
        time_zone=record.time_zone,
    )


def _tenant_bounds(
    record: Tenant, name: ResourceName, etag: str, warnings: Sequence[RecordWarning] = ()
) -> Iterable[Bounded]:
    if record.max_kv_blocks is not None:
        yield Bounded("tenant.max_kv_blocks", record.max_kv_blocks, 1, UINT32)


@encodes("Tenant", _tenant_bounds)
def tenant_to_wire(record: Tenant, name: ResourceName, etag: str, warnings: Sequence[RecordWarning] = ()) -> pb.Tenant:
    return pb.Tenant(
        name=str(name),
        etag=etag,
        limits=limits_to_wire(record.limits),
        model_limits=_rules_to_wire(record.model_limits),
        time_zone=record.time_zone,
        tier=tier_to_wire(record.tier),
        models=_models_to_wire(record.models),
        sharing_group=record.sharing_group,
        away=enum_name("AWAY_POLICY", record.away),
        max_kv_blocks=record.max_kv_blocks,
        pool=record.pool,
        uid=record.uid,
        warnings=[pb.RecordWarning(field=warning.field, message=warning.message) for warning in warnings],
    )


@encodes("Key")
def key_to_wire(record: KeyRecord, name: ResourceName, etag: str) -> pb.Key:
    """Without its HMAC, which is nobody's business."""
    return pb.Key(
        name=str(name),
        etag=etag,
        limits=limits_to_wire(record.limits),
        model_limits=_rules_to_wire(record.model_limits),
        prefix=record.prefix,
        create_time=time_to_wire(record.created_at) if record.created_at else None,
        expire_time=None if record.expires_at is None else time_to_wire(record.expires_at),
        revoke_time=None if record.revoked_at is None else time_to_wire(record.revoked_at),
        models=_models_to_wire(record.models),
        priority=record.priority,
        role=enum_name("ADMIN_ROLE", record.role),
    )


def organisation_from_wire(message: pb.Organization) -> Organisation:
    name = _name(message.name, RecordKind.ORGANISATION)
    limits, rules = limits_from_wire(message.limits), _rules_from_wire(message.model_limits)
    return Organisation(name.organisation, limits, rules, message.time_zone or "UTC")


def tenant_from_wire(message: pb.Tenant) -> Tenant:
    name = _name(message.name, RecordKind.TENANT)
    away = enum_from_wire(message, "away", message.away, pb.AwayPolicy, AwayPolicy)
    return Tenant(
        name=name.tenant,
        organisation=name.organisation,
        tier=tier_from_wire(message, message.tier),
        limits=limits_from_wire(message.limits),
        model_limits=_rules_from_wire(message.model_limits),
        models=_models_from_wire(message),
        time_zone=message.time_zone or "UTC",
        sharing_group=message.sharing_group,
        away=away or AwayPolicy.BOUNDED_LOCAL,
        max_kv_blocks=message.max_kv_blocks if message.HasField("max_kv_blocks") else None,
        pool=message.pool,
        uid=message.uid,
    )


def key_from_wire(message: pb.Key) -> KeyRecord:
    name = _name(message.name, RecordKind.KEY)
    role = enum_from_wire(message, "role", message.role, pb.AdminRole, AdminRole)
    return KeyRecord(
        id=name.key,
        tenant=name.tenant,
        prefix=message.prefix,
        secret_hmac="",
        created_at=time_from_wire(message, "create_time"),
        expires_at=time_from_wire(message, "expire_time") if message.HasField("expire_time") else None,
        revoked_at=time_from_wire(message, "revoke_time") if message.HasField("revoke_time") else None,
        limits=limits_from_wire(message.limits),
        model_limits=_rules_from_wire(message.model_limits),
        models=_models_from_wire(message),
        priority=message.priority,
        role=role or AdminRole.NONE,
    )


def versioned_organisation(message: pb.Organization) -> Versioned:
    name = parse_resource_name("name", message.name, RecordKind.ORGANISATION)
    return Versioned(name, organisation_from_wire(message), message.etag)


def versioned_tenant(message: pb.Tenant) -> Versioned:
    name = parse_resource_name("name", message.name, RecordKind.TENANT)
    warnings = tuple(RecordWarning(warning.field, warning.message) for warning in message.warnings)
    return Versioned(name, tenant_from_wire(message), message.etag, warnings)


def versioned_key(message: pb.Key) -> Versioned:
    return Versioned(parse_resource_name("name", message.name, RecordKind.KEY), key_from_wire(message), message.etag)


def _name(text: str, kind: RecordKind) -> ResourceName:
    """Empty in a record that is to be created: the request says what it will be called."""
    return parse_resource_name("name", text, kind) if text else ResourceName()
