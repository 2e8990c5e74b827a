"""Requests of tenants and tiers."""

from __future__ import annotations

from baton.core.types import Tier, TokenRequest
from tests.unit.engine.core_driver import Driver, prompt, request


def of(tenant: str, tier: Tier, length: int, salt: int, max_tokens: int = 8, **fields: object) -> TokenRequest:
    return request(prompt(length, salt), max_tokens, tenant=tenant, tier=tier, **fields)


def bronze(tenant: str, length: int, salt: int, max_tokens: int = 8, **fields: object) -> TokenRequest:
    return of(tenant, Tier.BRONZE, length, salt, max_tokens, **fields)


def reserve(driver: Driver, *wanted: TokenRequest) -> list[int]:
    return [driver.reserve(one, len(one.prompt)) for one in wanted]
