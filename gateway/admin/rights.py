"""Who may do what through the admin API. Pure.

A platform admin may do everything. A tenant admin looks after its own tenant: its keys, and the quotas of the tenant
and of its keys; what the organisation allows stands above them and is the platform's, as are tier, models, sharing
group, outage policy, pool and cap on KV blocks. A viewer looks at its own tenant. A key without a role is for requests
only.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.errors import NotFound, PermissionDenied
from baton.core.types import Account, AdminRole, KeyRecord, ResourceName

TENANT_ADMIN_FIELDS = frozenset({"limits", "model_limits", "time_zone"})  # of its own tenant
GRANTABLE = frozenset({AdminRole.NONE, AdminRole.VIEWER, AdminRole.TENANT_ADMIN})  # by a tenant admin


def home(caller: Account) -> ResourceName:
    """The caller's tenant."""
    return ResourceName(caller.organisation.name, caller.tenant.name)


def actor(caller: Account) -> str:
    """How the audit log names the caller."""
    return str(home(caller).child(caller.key.id))


def is_platform(caller: Account) -> bool:
    return caller.key.role is AdminRole.PLATFORM_ADMIN


def seen_from(name: ResourceName, caller: Account) -> ResourceName:
    """What the root stands for: everything for a platform admin, for others their tenant."""
    return name if name.organisation or is_platform(caller) else home(caller)


def check_platform(caller: Account, what: str) -> None:
    _check_any(caller)
    if not is_platform(caller):
        raise PermissionDenied(_rule(caller, what, AdminRole.PLATFORM_ADMIN))


def check_reads(caller: Account, name: ResourceName) -> None:
    """The caller may look at ``name``: its own tenant, what is below it, and the organisation above it.

    NotFound for others, so that nobody learns which names exist.
    """
    _check_any(caller)
    own = home(caller)
    if is_platform(caller) or name == own.parent or ResourceName(name.organisation, name.tenant) == own:
        return
    raise NotFound(f"{name or 'the root'}: does not exist, or is not the caller's")


def check_writes(caller: Account, name: ResourceName, what: str) -> None:
    """The caller may change ``name``, which is a tenant or a key."""
    check_reads(caller, name)
    if is_platform(caller):
        return
    if caller.key.role is not AdminRole.TENANT_ADMIN or not name.tenant:
        needed = AdminRole.TENANT_ADMIN if name.tenant else AdminRole.PLATFORM_ADMIN
        raise PermissionDenied(_rule(caller, what, needed))


def check_fields(caller: Account, name: ResourceName, fields: Iterable[str]) -> None:
    """``fields``: the paths that an update changes."""
    if is_platform(caller) or name.key:
        return
    for path in fields:
        if path.partition(".")[0] not in TENANT_ADMIN_FIELDS:
            raise PermissionDenied(_rule(caller, f"{path}: changing it", AdminRole.PLATFORM_ADMIN))


def check_granted(caller: Account, key: KeyRecord) -> None:
    """Nobody gives a key more than it has: neither a role nor a place further ahead."""
    if is_platform(caller):
        return
    if key.role not in GRANTABLE:
        raise PermissionDenied(_rule(caller, f"role {key.role}: giving it", AdminRole.PLATFORM_ADMIN))
    if key.priority > caller.key.priority:
        highest = f"must be at most {caller.key.priority}, that of the caller's key, got {key.priority}"
        raise PermissionDenied(f"priority: {highest}")


def _check_any(caller: Account) -> None:
    if caller.key.role is AdminRole.NONE:
        raise PermissionDenied(_rule(caller, "the admin API", AdminRole.VIEWER))


def _rule(caller: Account, what: str, needed: AdminRole) -> str:
    return f"{what} needs the role {needed}, key {caller.key.id!r} has {caller.key.role}"
