"""Pools of workers that are kept for tenants or tiers: who may be placed where. Pure.

Workers carry labels (``decode.labels``, ``prefill.labels``). A tenant's record may name one (``Tenant.pool``); the
planner maps further tenants and tiers to labels (``planner.pools``), which also says what labels are pools that nobody
else uses. It registers the map with itself, so that gateways keep to it while the planner is silent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from baton.core.types import PlanQuery, Tier

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
ENTRY = re.compile(rf"(?:(?:tier:({'|'.join(Tier)})|tenant:(.+))=)?({LABEL.pattern})")


@dataclass(frozen=True, slots=True)
class Pools:
    """Labels by tenant and by tier, and ``kept`` ones, for tenants whose records name them. What a record names goes
    before the map, and a tenant's own pool before its tier's."""

    by_tenant: Mapping[str, str] = field(default_factory=dict[str, str])
    by_tier: Mapping[Tier, str] = field(default_factory=dict[Tier, str])
    kept: frozenset[str] = frozenset()

    def label_for(self, query: PlanQuery) -> str | None:
        """The pool that all of the tenant's requests are placed in; None: workers that no pool is made of."""
        return query.pool or self.by_tenant.get(query.tenant) or self.by_tier.get(query.tier)

    def may_use(self, labels: Collection[str], query: PlanQuery) -> bool:
        """Whether a worker with ``labels`` may serve the tenant. To those without a pool, labels that the map does not
        name mean nothing."""
        wanted = self.label_for(query)
        if wanted is not None:
            return wanted in labels
        return self.labels.isdisjoint(labels)

    @property
    def labels(self) -> frozenset[str]:
        """Those of workers that are kept for somebody."""
        return self.kept.union(self.by_tenant.values(), self.by_tier.values())

    def where(self, query: PlanQuery) -> str:
        """In words, for refusals: the part of the fleet that the tenant's requests may be placed in."""
        label = self.label_for(query)
        return f"in the pool {label!r}" if label is not None else "outside the dedicated pools"


@lru_cache(maxsize=16)
def parse_pools(entries: tuple[str, ...]) -> Pools:
    """Entries ``tenant:NAME=LABEL``, ``tier:TIER=LABEL`` and ``LABEL``; ValueError names the one that is none of them,
    or a second one for the same tenant or tier."""
    by_tenant: dict[str, str] = {}
    by_tier: dict[Tier, str] = {}
    kept: set[str] = set()
    for entry in entries:
        found = ENTRY.fullmatch(entry)
        if found is None:
            raise ValueError(entry)
        tier, tenant, label = found.groups()
        if tenant in by_tenant or (tier and Tier(tier) in by_tier):
            raise ValueError(entry)
        if tier:
            by_tier[Tier(tier)] = label
        elif tenant:
            by_tenant[tenant] = label
        else:
            kept.add(label)
    return Pools(by_tenant, by_tier, frozenset(kept))


def known_pools(entries: tuple[str, ...]) -> Pools:
    """A registered map, as far as this version understands its entries."""
    return parse_pools(tuple(entry for entry in entries if ENTRY.fullmatch(entry)))
