"""Who may use how much: organisation > tenant > key, their limits, tiers and prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """Where a limit is set. All levels are checked, so the strictest one decides."""

    ORGANISATION = "organization"
    TENANT = "tenant"
    KEY = "key"


class Tier(StrEnum):
    """From the highest down."""

    GOLD = "gold"
    SILVER = "silver"
    BRONZE = "bronze"

    def is_below(self, other: Tier) -> bool:
        order = tuple(Tier)
        return order.index(self) > order.index(other)


class AdminRole(StrEnum):
    """What a key may do through the admin API; it says nothing of the models that it may use."""

    NONE = "none"
    VIEWER = "viewer"  # looks at its own tenant
    TENANT_ADMIN = "tenant_admin"  # its own tenant: keys, and the quotas of tenant and keys
    PLATFORM_ADMIN = "platform_admin"  # everything


class AwayPolicy(StrEnum):
    """What admission does for a tenant while the shared counters cannot be reached."""

    BOUNDED_LOCAL = "bounded_local"  # each gateway admits its share of the limits by itself
    CLOSED = "closed"  # nothing is admitted
    OPEN = "open"  # everything is admitted and accounted for afterwards


class Metric(StrEnum):
    """What a limit counts. The values are the names of the fields of ``Limits``."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    CONCURRENCY = "concurrency"
    BURST = "burst"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit at this level; 0: nothing at all. ``tokens_*`` count input and output together.

    Minutes are those of the clock; days and months are calendar ones in the time zone of the level that sets the limit.
    ``burst`` is how many requests may come at once, refilled evenly at ``requests_per_minute``. A metric in ``shadow``
    is counted and its would-be refusals reported, but nothing is refused for it.
    """

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    concurrency: int | None = None
    burst: int | None = None
    shadow: frozenset[Metric] = frozenset()

    def of(self, metric: Metric) -> int | None:
        """The limit of ``metric``, shadowed or not."""
        return getattr(self, metric.value)


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits for requests of one model, beside the ones for all models together."""

    model: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Organisation:
    """``time_zone`` is an IANA name; its days and months bound the organisation's daily and monthly limits."""

    name: str
    limits: Limits = UNLIMITED
    model_limits: tuple[ModelLimits, ...] = ()
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True)
class Tenant:
    """``models`` None: all. Tenants with the same ``sharing_group``, if it is not empty, may share prefix hits.

    ``time_zone`` bounds the days and months of the tenant's limits and those of its keys. Its requests may hold
    ``max_kv_blocks`` of one worker together (one alone always fits), None: as the worker is set. ``pool`` is the label
    of the workers that they are placed on, empty: as the planner is set. ``uid`` tells it from others that had its name
    before, given with the record; empty for one that nobody recorded.
    """

    name: str
    organisation: str
    tier: Tier = Tier.BRONZE
    limits: Limits = UNLIMITED
    model_limits: tuple[ModelLimits, ...] = ()
    models: tuple[str, ...] | None = None
    time_zone: str = "UTC"
    sharing_group: str = ""
    away: AwayPolicy = AwayPolicy.BOUNDED_LOCAL
    max_kv_blocks: int | None = None
    pool: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is stored of an API key: ``prefix`` to recognise it by, and an HMAC instead of its secret.

    Times are seconds since the Unix epoch. ``models`` None: all that the tenant may use.
    """

    id: str
    tenant: str
    prefix: str
    secret_hmac: str = field(repr=False)
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    limits: Limits = UNLIMITED
    model_limits: tuple[ModelLimits, ...] = ()
    models: tuple[str, ...] | None = None
    priority: int = 0
    role: AdminRole = AdminRole.NONE

    def is_active(self, now: float) -> bool:
        """``now`` in seconds since the Unix epoch."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class Account:
    """Who pays for a request, at each level."""

    organisation: Organisation
    tenant: Tenant
    key: KeyRecord


@dataclass(frozen=True, slots=True)
class Prices:
    """What one model costs, in integers so that sums are exact.

    The unit is the millionth part of a millionth (1e-12) of the price book's currency: 0.15 a million tokens are
    150,000 units a token. ``cached`` is for prompt tokens found in a prefix cache; ``joule`` for energy.
    """

    input: int = 0
    cached: int = 0
    output: int = 0
    joule: int = 0


FREE = Prices()
