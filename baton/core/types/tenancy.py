"""Who may use how much: organisation > tenant > key, their limits, tiers and prices."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    GOLD = "gold"
    SILVER = "silver"
    BRONZE = "bronze"
