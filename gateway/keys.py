"""API keys from one file: who is calling, which models they may use, how urgent they are, and their KV salt.

A key reads ``ID.SECRET``; the file holds the SHA-256 of the secret only. A secret has 256 random bits, so nothing
slower than SHA-256 is called for. The file (TOML, or JSON by its suffix)::

    server_secret = "<hex, at least 32 digits>"
    [[keys]]
    id = "local"
    tenant = "local"
    secret_sha256 = "<hex>"
    models = ["smollm2-135m-instruct"]   # optional: without it, all
    priority = 10                        # optional, -100 to 100, 0 without it: higher goes first among the tenant's
    tier = "gold"                        # optional, gold, silver or bronze, which it is without; one for each tenant
    role = "platform_admin"              # optional: what the key may do through the admin API; nothing without it

Gateways that share the file derive the same salts, so their tenants share prefix hits across gateways.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from baton.core.errors import ConfigError, InvalidRequest, Unauthenticated
from baton.core.tenancy import MAX_PRIORITY, check_name
from baton.core.types import Account, AdminRole, KeyRecord, Organisation, Principal, Tenant, Tier
from gateway.credentials import ServerSecret

_NOBODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the file knows of one key. ``models`` None: all."""

    id: str
    tenant: str
    secret_sha256: str = field(repr=False)
    models: tuple[str, ...] | None = None
    priority: int = 0
    tier: Tier = Tier.BRONZE
    role: AdminRole = AdminRole.NONE

    def account(self) -> Account:
        """Of a tenant that nobody has recorded: without limits, in an organisation of its own name."""
        key = KeyRecord(self.id, self.tenant, self.id, "", models=self.models, priority=self.priority, role=self.role)
        return Account(Organisation(self.tenant), Tenant(self.tenant, self.tenant, self.tier), key)


def new_key(key_id: str, tenant: str, models: tuple[str, ...] | None = None) -> tuple[str, ApiKey]:
    """A fresh key: what the caller is given, once, and what is stored."""
    if not key_id or "." in key_id:
        raise ConfigError(f"key id: must be non-empty and hold no dot, got {key_id!r}")
    secret = secrets.token_urlsafe(32)
    return f"{key_id}.{secret}", ApiKey(key_id, tenant, hashlib.sha256(secret.encode()).hexdigest(), models)


def new_server_secret() -> str:
    return secrets.token_hex(32)


def dump_keys(server_secret: str, keys: Iterable[ApiKey]) -> str:
    """The content of a JSON key file."""
    entries = [
        {"id": key.id, "tenant": key.tenant, "secret_sha256": key.secret_sha256}
        | ({} if key.models is None else {"models": list(key.models)})
        | ({} if key.priority == 0 else {"priority": key.priority})
        | ({} if key.tier is Tier.BRONZE else {"tier": key.tier.value})
        | ({} if key.role is AdminRole.NONE else {"role": key.role.value})
        for key in keys
    ]
    return json.dumps({"server_secret": server_secret, "keys": entries}, indent=2) + "\n"


class KeyRing:
    """Answers who holds a key. Salts come from here and nowhere else."""

    def __init__(self, server_secret: str, keys: Iterable[ApiKey]) -> None:
        self.secret = ServerSecret(server_secret)
        self._keys: dict[str, ApiKey] = {}
        tiers: dict[str, Tier] = {}
        for key in keys:
            if key.id in self._keys:
                raise ConfigError(f"keys: id {key.id!r} appears twice")
            if tiers.setdefault(key.tenant, key.tier) is not key.tier:
                raise ConfigError(
                    f"keys: tenant {key.tenant!r} has keys of the tiers {tiers[key.tenant]} and {key.tier}"
                )
            self._keys[key.id] = key

    def authenticate(self, presented: str | None) -> Principal:
        """Raises Unauthenticated without saying which part was wrong; takes the same time for any wrong secret."""
        if not presented:
            raise Unauthenticated("no API key: send the metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        key_id, _, secret = presented.partition(".")
        key = self._keys.get(key_id)
        expected = key.secret_sha256 if key else _NOBODY
        matches = hmac.compare_digest(hashlib.sha256(secret.encode()).hexdigest(), expected)
        if key is None or not matches:
            raise Unauthenticated("the API key is not valid")
        account = key.account()
        return Principal(key.tenant, key.id, self.secret.salt(account.tenant), key.priority, account)

    def account(self, key_id: str) -> Account | None:
        """What the file says of a key; None when it has none of this id."""
        key = self._keys.get(key_id)
        return None if key is None else key.account()


def load_keys(path: Path) -> KeyRing:
    """Read a key file. Raises ConfigError naming the entry and the field."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"key file {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"key file {path}: cannot be parsed: {error}") from error
    try:
        document = _table(content, "the file", {"server_secret", "keys"})
        entries = document.get("keys", [])
        if not isinstance(entries, list):
            raise ConfigError(f"keys: must be a list, got {type(entries).__name__}")
        keys = [_parse_key(entry, f"keys[{index}]") for index, entry in enumerate(cast("list[object]", entries))]
        return KeyRing(_text(document, "server_secret", "the file"), keys)
    except ConfigError as error:
        raise ConfigError(f"key file {path}: {error.message}") from error


def _parse_key(entry: object, where: str) -> ApiKey:
    table = _table(entry, where, {"id", "tenant", "secret_sha256", "models", "priority", "tier", "role"})
    digest = _text(table, "secret_sha256", where).lower()
    if len(digest) != len(_NOBODY) or set(digest) - set("0123456789abcdef"):
        raise ConfigError(f"{where}.secret_sha256: must be {len(_NOBODY)} hex digits, got {len(digest)} characters")
    models = table.get("models")
    if models is not None and not (
        isinstance(models, list) and all(isinstance(m, str) for m in cast("list[object]", models))
    ):
        raise ConfigError(f"{where}.models: must be a list of model names, got {models!r}")
    allowed = None if models is None else tuple(cast("list[str]", models))
    key_id = _text(table, "id", where)
    if "." in key_id:
        raise ConfigError(f"{where}.id: must hold no dot, got {key_id!r}")
    tenant = _text(table, "tenant", where)
    for name, value in (("id", key_id), ("tenant", tenant)):
        try:
            check_name(f"{where}.{name}", value)
        except InvalidRequest as error:
            raise ConfigError(error.message) from error
    tier, role = _tier(table, where), _role(table, where)
    return ApiKey(key_id, tenant, digest, allowed, _priority(table, where), tier, role)


def _tier(table: Mapping[str, object], where: str) -> Tier:
    value = table.get("tier", Tier.BRONZE.value)
    if value not in list(Tier):
        raise ConfigError(f"{where}.tier: must be one of {', '.join(Tier)}, got {value!r}")
    return Tier(value)


def _priority(table: Mapping[str, object], where: str) -> int:
    value = table.get("priority", 0)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_PRIORITY:
        limit = f"must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"{where}.priority: {limit}, got {value!r}")
    return value


def _role(table: Mapping[str, object], where: str) -> AdminRole:
    value = table.get("role", AdminRole.NONE.value)
    if value not in set(AdminRole):
        raise ConfigError(f"{where}.role: must be one of {', '.join(AdminRole)}, got {value!r}")
    return AdminRole(value)


def _table(value: object, where: str, known: set[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a table, got {type(value).__name__}")
    table = cast("dict[str, object]", value)
    if unknown := sorted(set(table) - known):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return table


def _text(table: Mapping[str, object], name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{where}: {name} must be a non-empty string, got {value!r}"
            if name != "server_secret"
            else f"{where}: server_secret must be a non-empty string"
        )
    return value
