"""Pools of workers that are kept for one tenant or tier: who may be placed where. Pure.

Workers carry labels (``decode.labels``, ``prefill.labels``); the planner maps tenants and tiers to labels
(``planner.pools``) and registers the map with itself, so that gateways keep to it while the planner is silent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from baton.core.types import Tier

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
ENTRY = re.compile(rf"(?:tier:({'|'.join(Tier)})|tenant:(.+))=({LABEL.pattern})")


@dataclass(frozen=True, slots=True)
class Pools:
    """Labels by tenant and by tier. A tenant's own pool wins over its tier's."""

    by_tenant: Mapping[str, str] = field(default_factory=dict[str, str])
    by_tier: Mapping[Tier, str] = field(default_factory=dict[Tier, str])

    def label_for(self, tenant: str, tier: Tier) -> str | None:
        """The pool that all of the tenant's requests are placed in; None: workers that no pool is made of."""
        return self.by_tenant.get(tenant) or self.by_tier.get(tier)

    def may_use(self, labels: Collection[str], tenant: str, tier: Tier) -> bool:
        """Whether a worker with ``labels`` may serve the tenant. Labels that the map does not name mean nothing."""
        wanted = self.label_for(tenant, tier)
        if wanted is not None:
            return wanted in labels
        return not any(label in labels for label in (*self.by_tenant.values(), *self.by_tier.values()))


@lru_cache(maxsize=16)
def parse_pools(entries: tuple[str, ...]) -> Pools:
    """Entries ``tenant:NAME=LABEL`` and ``tier:TIER=LABEL``; ValueError names the one that is neither, or a second one
    for the same tenant or tier."""
    by_tenant: dict[str, str] = {}
    by_tier: dict[Tier, str] = {}
    for entry in entries:
        found = ENTRY.fullmatch(entry)
        if found is None:
            raise ValueError(entry)
        tier, tenant, label = found.groups()
        if tenant in by_tenant or (tier and Tier(tier) in by_tier):
            raise ValueError(entry)
        if tier:
            by_tier[Tier(tier)] = label
        else:
            by_tenant[tenant] = label
    return Pools(by_tenant, by_tier)


def known_pools(entries: tuple[str, ...]) -> Pools:
    """A registered map, as far as this version understands its entries."""
    return parse_pools(tuple(entry for entry in entries if ENTRY.fullmatch(entry)))
