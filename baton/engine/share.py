"""The share of one tenant, and of one tier, in an engine: what it was charged and what it holds. Plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from baton.core.types import Tier
from baton.engine.tiers import TierPolicy

NEVER = -math.inf


class BlockCap(NamedTuple):
    """KV blocks that a tenant may hold, and the name of the setting that says so."""

    blocks: int
    limit: str


class TierShare:
    """``fixed_*`` is the part of places and blocks that cannot be preempted: reservations that wait, and prefills."""

    __slots__ = (
        "blocks",
        "counter",
        "credit",
        "fixed_blocks",
        "fixed_places",
        "last",
        "left_at",
        "live",
        "place",
        "places",
        "policy",
        "preemptions",
        "promised",
        "promised_cost",
        "tenants",
        "tier",
        "waiting",
    )

    def __init__(self, tier: Tier, policy: TierPolicy, place: int) -> None:
        self.tier = tier
        self.policy = policy
        self.place = place  # 0 is the highest tier
        self.tenants: dict[str, TenantShare] = {}  # those with requests here
        self.live = 0
        self.waiting = 0
        self.preemptions = 0
        self.left_at = NEVER  # when its last request ended
        self.counter = 0.0  # what its tenants were charged, divided by the tier's weight
        self.last = 0.0  # counter of the tenant that was served last
        self.promised = 0  # tokens
        self.promised_cost = 0.0
        self.places = self.fixed_places = 0
        self.blocks = self.fixed_blocks = 0
        self.credit = 0.0  # prompt tokens that go before those of others

    @property
    def due(self) -> float:
        """What places are given by: the counter and what is promised."""
        return self.counter + self.promised_cost / self.policy.weight

    @property
    def is_backlogged(self) -> bool:
        return bool(self.waiting or self.promised)

    def is_present(self, now: float, idle_seconds: float) -> bool:
        return self.live > 0 or now - self.left_at < idle_seconds


class TenantShare:
    """``blocks`` counts references, so that its length is the number of distinct blocks held."""

    __slots__ = (
        "blocks",
        "cap",
        "counter",
        "live",
        "promised",
        "promised_cost",
        "rescued_at",
        "served_at",
        "tenant",
        "tier",
        "waiting",
    )

    def __init__(self, tenant: str, tier: TierShare) -> None:
        self.tenant = tenant
        self.tier = tier
        self.live = 0
        self.waiting = 0
        self.counter = 0.0
        self.promised = 0  # tokens
        self.promised_cost = 0.0
        self.blocks: dict[int, int] = {}
        self.cap: BlockCap | None = None
        self.rescued_at = NEVER  # when a request of it last went first for having waited too long
        self.served_at = NEVER  # when prompt tokens of it were last computed in a step that was not enough for all

    @property
    def due(self) -> float:
        return self.counter + self.promised_cost

    @property
    def is_backlogged(self) -> bool:
        return bool(self.waiting or self.promised)

    def is_capped(self, more: int) -> bool:
        """With ``more`` blocks it would hold more than it may. One request alone always fits."""
        return self.cap is not None and bool(self.blocks) and len(self.blocks) + more > self.cap.blocks

    @property
    def cap_reason(self) -> str:
        if self.cap is None:
            return ""
        return f"{self.cap.limit}: its tenant holds {len(self.blocks)} KV blocks, and may hold {self.cap.blocks}"

    def charge(self, cost: float) -> None:
        self.counter += cost
        self.tier.counter += cost / self.tier.policy.weight

    def promise(self, tokens: int, cost: float) -> None:
        for share in (self, self.tier):
            share.promised += tokens
            share.promised_cost = share.promised_cost + cost if share.promised else 0.0

    def own(self, blocks: Iterable[int]) -> int:
        """How many of them, one request's, the tenant would not hold without that request."""
        return sum(self.blocks[block] == 1 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> int:
        """One more reference to each. Returns how many were not held before."""
        before = len(self.blocks)
        for block in blocks:
            self.blocks[block] = self.blocks.get(block, 0) + 1
        return len(self.blocks) - before

    def let_go(self, blocks: Iterable[int]) -> int:
        """One reference less to each. Returns how many are not held any more."""
        before = len(self.blocks)
        for block in blocks:
            left = self.blocks[block] - 1
            if left:
                self.blocks[block] = left
            else:
                del self.blocks[block]
        return before - len(self.blocks)
