"""What an update makes of a record: the fields that its mask names, taken from what was given. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.types import KeyRecord, Limits, Organisation, TenancyRecord, Tenant

EVERYTHING = "*"
_MUTABLE: dict[type, tuple[str, ...]] = {
    Organisation: ("limits", "model_limits", "time_zone"),
    Tenant: ("tier", "limits", "model_limits", "models", "time_zone", "sharing_group", "away", "max_kv_blocks", "pool"),
    KeyRecord: ("expires_at", "limits", "model_limits", "models", "priority", "role"),
}
_LIMITS = tuple(field.name for field in dataclasses.fields(Limits))


def paths_of(mask: Sequence[str], kind: type) -> tuple[str, ...]:
    """The fields that ``mask`` stands for. InvalidRequest when it is empty or names something else."""
    mutable = _MUTABLE[kind]
    if not mask:
        raise InvalidRequest(f"update_mask: must name fields, of {', '.join(mutable)}, or '*'", field="update_mask")
    if EVERYTHING in mask:
        return mutable
    for path in mask:
        head, dot, limit = path.partition(".")
        if head not in mutable or (dot and (head != "limits" or limit not in _LIMITS)):
            known = f"must be of {', '.join(mutable)}, or limits.* of {', '.join(_LIMITS)}"
            raise InvalidRequest.out_of_range("update_mask", repr(path[:100]), known)
    return tuple(mask)


def merged(current: TenancyRecord, given: TenancyRecord, paths: Sequence[str]) -> TenancyRecord:
    """``current`` with the fields of ``paths`` from ``given``."""
    changes: dict[str, Any] = {path: getattr(given, path) for path in paths if "." not in path}
    parts = [path.partition(".")[2] for path in paths if "." in path]
    if parts and "limits" not in changes:
        limits: dict[str, Any] = {part: getattr(given.limits, part) for part in parts}
        changes["limits"] = dataclasses.replace(current.limits, **limits)
    return dataclasses.replace(current, **changes)
