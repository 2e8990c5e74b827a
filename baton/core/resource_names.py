"""Reading resource names; refusals say which pattern a part must follow."""

from __future__ import annotations

from baton.core.errors import InvalidRequest
from baton.core.tenancy import check_name
from baton.core.types import RecordKind, ResourceName

_COLLECTIONS = ("organizations", "tenants", "keys")
_FORMS = {
    RecordKind.ORGANISATION: "organizations/O",
    RecordKind.TENANT: "organizations/O/tenants/T",
    RecordKind.KEY: "organizations/O/tenants/T/keys/K",
}


def parse_resource_name(field: str, text: str, *kinds: RecordKind) -> ResourceName:
    """``kinds``: what it may name; without any, everything and the root, whose name is empty."""
    if not text and not kinds:
        return ResourceName()
    parts = text.split("/")
    names = parts[1::2]
    if (
        not 2 <= len(parts) <= 2 * len(_COLLECTIONS)
        or len(parts) % 2
        or tuple(parts[::2]) != _COLLECTIONS[: len(names)]
    ):
        raise _wrong(field, text, kinds)
    for collection, name in zip(_COLLECTIONS, names, strict=False):
        check_name(f"{field}.{collection}", name)
    found = ResourceName(*names)
    if kinds and found.kind not in kinds:
        raise _wrong(field, text, kinds)
    return found


def _wrong(field: str, text: str, kinds: tuple[RecordKind, ...]) -> InvalidRequest:
    forms = " or ".join(_FORMS[kind] for kind in kinds or tuple(RecordKind))
    return InvalidRequest.out_of_range(field, repr(text[:200]), f"must be {forms}")
