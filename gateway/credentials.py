"""API keys and salts, derived from the server's secret.

A key reads ``ID.SECRET``. What is stored is an HMAC under the server's secret, so that whoever reads the store can
neither use a key nor test a guess. A secret has 256 random bits, so nothing slower than one HMAC is called for.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace

from baton.core.errors import ConfigError, InvalidRequest
from baton.core.tenancy import check_key
from baton.core.types import KeyRecord, Tenant

SALT_BYTES = 16
MIN_SECRET_DIGITS = 32
SHOWN_DIGITS = 4  # of a secret, in the prefix by which people recognise a key
MAX_OVERLAP_SECONDS = 90 * 86_400


class ServerSecret:
    """Gateways with the same secret accept the same keys and share the prefix hits of a tenant."""

    def __init__(self, text: str) -> None:
        if len(text) < MIN_SECRET_DIGITS:
            raise ConfigError(f"server_secret: must have at least {MIN_SECRET_DIGITS} digits, got {len(text)}")
        self._key = text.encode()

    def issue(self, key: KeyRecord) -> tuple[str, KeyRecord]:
        """A fresh secret for ``key``: what its holder is told, this once, and what is stored."""
        secret = secrets.token_urlsafe(32)
        issued = replace(key, prefix=f"{key.id}.{secret[:SHOWN_DIGITS]}", secret_hmac=self._digest(key.id, secret))
        check_key(issued)
        return f"{key.id}.{secret}", issued

    def rotate(self, key: KeyRecord, successor: str, *, overlap: float, now: float) -> tuple[str, KeyRecord, KeyRecord]:
        """A successor with all the rights of ``key``, which itself ends after ``overlap`` seconds.

        What the holder is told, the successor, and the old key as it is to be stored.
        """
        if not 0 < overlap <= MAX_OVERLAP_SECONDS:
            rule = f"must be above 0 and at most {MAX_OVERLAP_SECONDS} seconds"
            raise InvalidRequest.out_of_range("overlap", overlap, rule)
        if not key.is_active(now):
            raise InvalidRequest(f"key.id: {key.id!r} is no longer active and cannot be rotated", field="key.id")
        if successor == key.id:
            raise InvalidRequest.out_of_range("successor", repr(successor), "must differ from the key's own id")
        shown, issued = self.issue(replace(key, id=successor, created_at=now, expires_at=None))
        end = now + overlap
        return shown, issued, replace(key, expires_at=end if key.expires_at is None else min(end, key.expires_at))

    def proves(self, key: KeyRecord, secret: str) -> bool:
        """Whether ``secret`` is that of ``key``; takes the same time for any wrong one."""
        return hmac.compare_digest(self._digest(key.id, secret), key.secret_hmac)

    def salt(self, tenant: Tenant) -> bytes:
        """What keeps the tenant's KV blocks apart from everyone's outside its sharing group.

        Groups are an organisation's own: nobody joins one by guessing its name. A deleted tenant's blocks stay in
        caches, so whoever has its name later has another salt.
        """
        if tenant.sharing_group:
            whose = f"kv-group:{tenant.organisation}/{tenant.sharing_group}"
        else:
            whose = f"kv-salt:{tenant.organisation}/{tenant.name}/{tenant.uid}"
        return hmac.digest(self._key, whose.encode(), "sha256")[:SALT_BYTES]

    def _digest(self, key_id: str, secret: str) -> str:
        return hmac.digest(self._key, f"api-key:{key_id}:{secret}".encode(), "sha256").hex()
