"""Where the shared state is (section ``state``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton.core.config import mask_password, secret
from baton.core.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class StateConfig:
    """``url`` is redis://HOST:PORT/DB; rediss:// and unix:// too, as redis-py takes them. ``timeout_ms`` is the budget
    of one call, ``connect_timeout_ms`` what it may need besides to connect; a frozen server costs no more than both.

    ``quota_budget_ms`` is how long Redis may be silent, connecting included, while admissions and settlements wait for
    it; a batch of them that it answers bit by bit may take ``quota_slow_ms`` in all. How an admission ended is
    remembered for ``quota_remember_seconds``: a settlement whose answer was lost may be sent again so long.
    """

    url: str = "redis://127.0.0.1:6379/0"
    password: str = secret()
    timeout_ms: float = 50.0
    connect_timeout_ms: float = 250.0
    lease_seconds: float = 3.0
    namespace: str = "baton"
    quota_budget_ms: float = 50.0
    quota_slow_ms: float = 1000.0
    quota_remember_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not _is_url(self.url):
            rule = f"must be a URL with {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
            raise ConfigError(f"state.url {rule}, got {mask_password(self.url)!r}")
        for key in (
            "timeout_ms",
            "connect_timeout_ms",
            "lease_seconds",
            "quota_budget_ms",
            "quota_slow_ms",
            "quota_remember_seconds",
        ):
            value = getattr(self, key)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"state.{key} must be above 0, got {value!r}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in SCHEMES and parts.port != 0
    except ValueError:  # a port that is none
        return False
