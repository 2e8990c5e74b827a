"""What organisations, tenants and keys may look like; refusals name the field, the limit and the value."""

from __future__ import annotations

import re
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from baton.core.errors import InvalidRequest
from baton.core.pools import LABEL
from baton.core.types import Account, KeyRecord, Limits, Metric, ModelLimits, Organisation, TenancyRecord, Tenant

MAX_LIMIT = 10**12  # sums of a month stay exact in the 53 bits that Redis scripts count with
MAX_PRIORITY = 100
MAX_MODEL_NAME = 256
MAX_KV_BLOCKS = 2**31 - 1

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NAME_RULE = "must be 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"


def check_name(field: str, name: str) -> None:
    """Names become parts of Redis keys, metric labels and log lines, and hold nothing that means something there."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest.out_of_range(field, repr(name[:100]), _NAME_RULE)


def check_model_name(field: str, model: str) -> None:
    if not model or len(model) > MAX_MODEL_NAME or not model.isprintable():
        rule = f"must be 1 to {MAX_MODEL_NAME} printable characters"
        raise InvalidRequest.out_of_range(field, repr(model[:100]), rule)


def check_time_zone(field: str, name: str) -> None:
    try:
        if name != "UTC":
            ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRequest.out_of_range(field, repr(name[:100]), "must be an IANA time zone") from error


def check_limits(field: str, limits: Limits) -> None:
    for metric in Metric:
        limit = limits.of(metric)
        if limit is not None and not 0 <= limit <= MAX_LIMIT:
            raise InvalidRequest.out_of_range(f"{field}.{metric}", limit, f"must be from 0 to {MAX_LIMIT}")
    if limits.burst is not None and not limits.requests_per_minute:
        rule = "needs requests_per_minute above 0, at which it is refilled"
        raise InvalidRequest.out_of_range(f"{field}.burst", limits.burst, rule)
    if limits.burst == 0:
        raise InvalidRequest.out_of_range(f"{field}.burst", 0, "must be at least 1")
    if unset := sorted(metric for metric in limits.shadow if limits.of(metric) is None):
        raise InvalidRequest.out_of_range(f"{field}.shadow", repr(str(unset[0])), "must name limits that are set")


def check_organisation(organisation: Organisation) -> None:
    check_name("organisation.name", organisation.name)
    check_time_zone("organisation.time_zone", organisation.time_zone)
    _check_level("organisation", organisation.limits, organisation.model_limits)


def check_tenant(tenant: Tenant) -> None:
    check_name("tenant.name", tenant.name)
    check_name("tenant.organisation", tenant.organisation)
    check_time_zone("tenant.time_zone", tenant.time_zone)
    if tenant.sharing_group:
        check_name("tenant.sharing_group", tenant.sharing_group)
    if tenant.max_kv_blocks is not None and not 1 <= tenant.max_kv_blocks <= MAX_KV_BLOCKS:
        rule = f"must be from 1 to {MAX_KV_BLOCKS}"
        raise InvalidRequest.out_of_range("tenant.max_kv_blocks", tenant.max_kv_blocks, rule)
    if tenant.pool and not LABEL.fullmatch(tenant.pool):
        rule = f"must be a label of the form {LABEL.pattern}"
        raise InvalidRequest.out_of_range("tenant.pool", repr(tenant.pool[:100]), rule)
    _check_models("tenant.models", tenant.models)
    _check_level("tenant", tenant.limits, tenant.model_limits)


def check_record(record: TenancyRecord) -> None:
    """By the check of its kind."""
    match record:
        case Organisation():
            check_organisation(record)
        case Tenant():
            check_tenant(record)
        case KeyRecord():
            check_key(record)


def check_key(key: KeyRecord) -> None:
    check_name("key.id", key.id)
    if "." in key.id:
        raise InvalidRequest.out_of_range("key.id", repr(key.id), "must hold no dot, which ends it in a key")
    check_name("key.tenant", key.tenant)
    if abs(key.priority) > MAX_PRIORITY:
        rule = f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidRequest.out_of_range("key.priority", key.priority, rule)
    if key.expires_at is not None and key.expires_at <= key.created_at:
        raise InvalidRequest.out_of_range("key.expires_at", key.expires_at, f"must be after {key.created_at}")
    _check_models("key.models", key.models)
    _check_level("key", key.limits, key.model_limits)


def allows_model(account: Account, model: str) -> bool:
    """Both the tenant and the key must allow it."""
    lists = (account.tenant.models, account.key.models)
    return all(allowed is None or model in allowed for allowed in lists)


def _check_models(field: str, models: tuple[str, ...] | None) -> None:
    for index, model in enumerate(models or ()):
        check_model_name(f"{field}[{index}]", model)


def _check_level(field: str, limits: Limits, model_limits: tuple[ModelLimits, ...]) -> None:
    check_limits(f"{field}.limits", limits)
    seen: set[str] = set()
    for rule in model_limits:
        check_model_name(f"{field}.model_limits", rule.model)
        if rule.model in seen:
            raise InvalidRequest.out_of_range(f"{field}.model_limits", repr(rule.model), "must name each model once")
        seen.add(rule.model)
        check_limits(f"{field}.model_limits[{rule.model}]", rule.limits)
