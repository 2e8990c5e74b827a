"""Process records to and from JSON bytes, the form in which the registry stores them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

from baton.core.types import (
    EngineStats,
    KvFormat,
    ModelCard,
    ProcessRecord,
    Role,
    Tier,
    TierLoad,
    TierStats,
    WorkerState,
)


def encode_record(record: ProcessRecord) -> bytes:
    return json.dumps(dataclasses.asdict(record), separators=(",", ":")).encode()


def decode_record(data: bytes) -> ProcessRecord:
    """Raises ValueError for bytes that are no record. Fields of a newer version are ignored (rolling upgrades)."""
    try:
        fields = cast(dict[str, Any], json.loads(data))
        known = _known(ProcessRecord, fields)
        known["role"] = Role(fields["role"])
        known["state"] = WorkerState(fields["state"])
        known["card"] = _card(fields["card"]) if fields.get("card") else None
        known["labels"] = tuple(fields.get("labels", ()))
        known["pools"] = tuple(fields.get("pools", ()))
        known["stats"] = _stats(fields.get("stats") or {})
        known["tier"] = TierStats(**_figures(_known(TierStats, fields["tier"]))) if fields.get("tier") else None
        return ProcessRecord(**known)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a process record: {error}") from error


def _stats(fields: dict[str, Any]) -> EngineStats:
    known = _figures(_known(EngineStats, fields), "tiers")
    known["tiers"] = tuple(_tier_load(load) for load in fields.get("tiers", ()) if load["tier"] in set(Tier))
    return EngineStats(**known)


def _tier_load(fields: dict[str, Any]) -> TierLoad:
    known = _figures(_known(TierLoad, fields), "tier")
    known["tier"] = Tier(fields["tier"])
    return TierLoad(**known)


def _figures(known: dict[str, Any], *others: str) -> dict[str, Any]:
    """All but ``others`` have to be numbers: planning calculates with them, and one bad record must not end it."""
    for name, value in known.items():
        if name not in others and not isinstance(value, int | float):
            raise TypeError(f"{name}: must be a number, got {value!r}")
    return known


def _card(fields: dict[str, Any]) -> ModelCard:
    known = _known(ModelCard, fields)
    known["format"] = KvFormat(**_known(KvFormat, fields["format"]))
    known["eos_token_ids"] = tuple(fields["eos_token_ids"])
    known["modules"] = tuple(fields.get("modules", ()))
    return ModelCard(**known)


def _known(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}
