"""Where the shared state is (section ``state``)."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.config import secret


@dataclass(frozen=True, slots=True)
class StateConfig:
    """``url`` is redis://HOST:PORT/DB. ``timeout_ms`` is the budget of one call; a frozen server costs no more.

    ``quota_budget_ms`` is that of one admission or settlement, connecting included. How an admission ended is
    remembered for ``quota_remember_seconds``: a settlement whose answer was lost may be sent again so long.
    """

    url: str = "redis://127.0.0.1:6379/0"
    password: str = secret()
    timeout_ms: float = 50.0
    connect_timeout_ms: float = 250.0
    lease_seconds: float = 3.0
    namespace: str = "baton"
    quota_budget_ms: float = 50.0
    quota_remember_seconds: float = 600.0
