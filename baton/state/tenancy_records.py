"""Organisations, tenants and keys to and from JSON, the form in which they are stored."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar, cast

from baton.core.types import AdminRole, AwayPolicy, KeyRecord, Limits, Metric, ModelLimits, Organisation, Tenant, Tier

Record = TypeVar("Record", Organisation, Tenant, KeyRecord)


def encode(record: Organisation | Tenant | KeyRecord) -> bytes:
    return json.dumps(_plain(dataclasses.asdict(record)), separators=(",", ":"), sort_keys=True).encode()


def decode(kind: type[Record], data: bytes) -> Record:
    """Raises ValueError for bytes that are no such record. Fields of a newer version are ignored (rolling upgrades)."""
    try:
        fields = _known(kind, cast("dict[str, Any]", json.loads(data)))
        for name, value in fields.items():
            fields[name] = _field(name, value)
        return kind(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of kind {kind.__name__}: {error}") from error


def _field(name: str, value: Any) -> object:
    if name == "limits":
        return _limits(value)
    if name == "model_limits":
        return tuple(ModelLimits(rule["model"], _limits(rule["limits"])) for rule in value)
    if name == "models":
        return None if value is None else tuple(value)
    if name == "tier":
        return Tier(value)
    if name == "role":
        return AdminRole(value)
    return AwayPolicy(value) if name == "away" else value


def _limits(fields: dict[str, Any]) -> Limits:
    known = _known(Limits, fields)
    known["shadow"] = frozenset(Metric(name) for name in fields.get("shadow", ()))
    return Limits(**known)


def _known(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def _plain(value: Any) -> Any:
    """Sets have no JSON; everything else of these records has."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in cast("tuple[Any, ...]", value)]
    return sorted(cast("frozenset[str]", value)) if isinstance(value, frozenset) else value
