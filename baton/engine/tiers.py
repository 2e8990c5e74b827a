"""What each tier of tenants is promised when requests compete in an engine (setting ``engine.tiers``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.types import Tier

ENTRY = re.compile(rf"({'|'.join(Tier)})=([^:]+):([^:]+):([^:]+)")
DEFAULT_TIERS = ("gold=8:0.5:5", "silver=3:0.2:10", "bronze=1:0.1:30")
PLACE: Mapping[Tier, int] = {tier: place for place, tier in enumerate(Tier)}  # 0 is the highest


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """``weight``: tokens, beside those of other tiers, while both have work waiting.

    ``reserved_share``: of places, blocks and prompt tokens of a step. Others use what of it the tier leaves idle, and
    give it back when it asks. ``bound_seconds``: the oldest request of a tenant that has waited for so long goes first,
    whatever its tier.
    """

    weight: float
    reserved_share: float
    bound_seconds: float


def parse_tiers(entries: Iterable[str]) -> dict[Tier, TierPolicy]:
    """Entries ``TIER=WEIGHT:RESERVED:BOUND``; a tier without one is as in ``DEFAULT_TIERS``. ConfigError names the
    entry and what is wrong with it."""
    given: dict[Tier, TierPolicy] = {}
    for entry in entries:
        tier, policy = _parse(entry)
        _require(tier not in given, "must name a tier once", entry)
        given[tier] = policy
    policies = {**dict(map(_parse, DEFAULT_TIERS)), **given}
    reserved = sum(policy.reserved_share for policy in policies.values())
    _require(reserved <= 1 + 1e-9, "must reserve at most 1 in all", f"{reserved:g}")
    return policies


def _parse(entry: str) -> tuple[Tier, TierPolicy]:
    found = ENTRY.fullmatch(entry)
    form = f"must hold entries TIER=WEIGHT:RESERVED:BOUND, TIER one of {', '.join(Tier)}"
    if found is None:
        raise ConfigError(f"engine.tiers {form}, got {entry!r}")
    try:
        weight, reserved, bound = (float(found[i]) for i in (2, 3, 4))
    except ValueError as error:
        raise ConfigError(f"engine.tiers {form}, got {entry!r}") from error
    _require(0 < weight < math.inf, "must have weights above 0", entry)
    _require(0 <= reserved <= 1, "must have reserved shares from 0 to 1", entry)
    _require(0 < bound < math.inf, "must have bounds above 0 seconds", entry)
    return Tier(found[1]), TierPolicy(weight, reserved, bound)


def _require(holds: bool, rule: str, got: str) -> None:
    if not holds:
        raise ConfigError(f"engine.tiers {rule}, got {got!r}")
