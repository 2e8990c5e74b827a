"""Quotas that all gateways share, in Redis: one atomic script a decision, on the server's own time.

Every key of an organisation has its hash tag, ``<namespace>:{<organisation>}:quota:...``: a claim draws on buckets of
the organisation, the tenant and the key at once, and one script can be atomic over one slot only. So organisations
spread over the shards of a cluster, and one organisation's admissions are bounded by one core of its shard. Days and
months come from the caller, who knows time zones; the script refuses windows that do not hold its own time, and the
caller names them again by the time that the refusal brought. Clocks of gateways may differ as they like.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar, cast

from redis.asyncio import Redis

from baton.core.clock import Clock
from baton.core.errors import QuotaExceeded, StateUnavailable
from baton.core.types import (
    Account,
    Delivered,
    LeaseState,
    Metric,
    Prices,
    Progress,
    QuotaBalance,
    QuotaClaim,
    QuotaGrant,
    SettleOutcome,
)
from baton.state.config import StateConfig
from baton.state.quota.buckets import (
    NO_CHARGE,
    Buckets,
    Charge,
    Cost,
    Counters,
    FlowBucket,
    FlowCounters,
    WindowBucket,
    WindowCounters,
    buckets_of,
)
from baton.state.quota.claims import check_claim, member_of, size_in_use
from baton.state.quota.scripts import Scripts
from baton.state.quota.verdict import balances, debited, judge
from baton.state.quota.windows import MICROSECONDS, Calendar
from baton.state.redis_client import within

DUE_AT_ONCE = 100  # leases that one call ends: a script holds up the server
ATTEMPTS = 3  # a window may end between two of them, not between three

T = TypeVar("T")
Row = list[str | int]


def organisation_prefix(namespace: str, organisation: str) -> str:
    return f"{namespace}:{{{organisation}}}:quota:"


class SharedQuota:
    """Implements ``QuotaApi``. Every call ends within ``quota_budget_ms`` or raises StateUnavailable.

    How an admission ended is remembered for ``quota_remember_seconds``, so that telling it again changes nothing.
    """

    def __init__(self, client: Redis, config: StateConfig, clock: Clock) -> None:
        self._client = client
        self._namespace = config.namespace
        self._budget = config.quota_budget_ms / 1000
        self._kept = round(config.quota_remember_seconds * 1000)
        self._clock = clock
        self._server_ahead = 0  # microseconds, as the latest answer told
        self._calendar = Calendar()
        self._scripts = Scripts(client)

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        member = check_claim(claim)
        lease = round(claim.lease_seconds * MICROSECONDS)
        size = (claim.input_tokens, claim.output_tokens)
        head = (member, claim.owner, _who(claim), _prices(claim.prices), *size, lease, self._kept)

        async def attempt(buckets: Buckets) -> list[object]:
            return await self._call("reserve", claim, *head, *_reserve_rows(buckets))

        reply, buckets = await within(self._timely(claim, attempt), self._budget, "reserve quota")
        status, now, cost, counters = _read_reply(reply, buckets)
        if status == "in_use":
            raise size_in_use(claim)
        verdict = judge(buckets, counters, cost, now)
        if status == "refused":
            raise QuotaExceeded.of(verdict.refused)
        if status == "taken":
            return QuotaGrant(balances(buckets, counters, now), taken_over=True)
        return QuotaGrant(balances(buckets, _after(buckets, counters, cost, now), now), verdict.shadowed)

    async def renew(self, organisation: str, progress: Sequence[Progress], lease_seconds: float) -> list[LeaseState]:
        rows: Row = []
        for each in progress:
            told = each.delivered
            numbers = f"{told.input_tokens} {told.cached_tokens} {told.output_tokens}"
            rows += [member_of(each.tenant, each.request_id), each.owner, numbers]
        prefix, lease = organisation_prefix(self._namespace, organisation), round(lease_seconds * MICROSECONDS)
        call = self._scripts.call("renew", prefix, lease, *rows)
        states = cast("list[bytes]", await within(call, self._budget, "renew quota leases"))
        return [LeaseState(state.decode()) for state in states]

    async def settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        return await within(self._settle(claim, delivered), self._budget, "settle quota")

    async def release(self, claim: QuotaClaim) -> SettleOutcome:
        status = await within(self._end(claim, NO_CHARGE), self._budget, "release quota")
        return SettleOutcome.ALREADY if status == "missing" else SettleOutcome(status)

    async def expire(self) -> int:
        """Of every organisation that has reservations, whoever made them. Each of its calls has the budget anew."""
        ended = 0
        for prefix in await within(self._with_open(), 1.0 + self._budget, "find open reservations"):
            found = DUE_AT_ONCE
            while found == DUE_AT_ONCE:
                call = self._scripts.call("expire", prefix, DUE_AT_ONCE)
                found = cast(int, await within(call, self._budget, "expire quota reservations"))
                ended += found
        return ended

    async def balances(self, account: Account, model: str) -> tuple[QuotaBalance, ...]:
        now = self._now()
        buckets = self._buckets(account, model, now)
        counters = await within(self._read(account, buckets), self._budget, "read quota counters")
        return balances(buckets, counters, now)

    # --- parts of a call --------------------------------------------------------------------------------------------

    async def _settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        total = Charge.of(delivered, claim.prices)
        status = await self._end(claim, total)
        if status == "missing":
            status = await self._charge(claim, total)
        return SettleOutcome(status)

    async def _end(self, claim: QuotaClaim, total: Charge) -> str:
        member = check_claim(claim)
        reply = await self._call("settle", claim, member, claim.owner, *_charge_row(total), self._kept)
        return cast(bytes, reply).decode()

    async def _charge(self, claim: QuotaClaim, total: Charge) -> str:
        head = (check_claim(claim), claim.owner, _who(claim), *_charge_row(total), self._kept)

        async def attempt(buckets: Buckets) -> list[object]:
            rows: Row = [len(buckets.windows)]
            for bucket in buckets.windows:
                rows += [bucket.name, bucket.window.start, bucket.window.end, _limit(bucket.alert_limit)]
            return await self._call("charge", claim, *head, *rows)

        reply, _ = await self._timely(claim, attempt)
        return cast(bytes, reply[0]).decode()

    async def _timely(
        self, claim: QuotaClaim, attempt: Callable[[Buckets], Awaitable[list[object]]]
    ) -> tuple[list[object], Buckets]:
        """``attempt`` with the windows of the server's time, and those windows."""
        for _ in range(ATTEMPTS):
            buckets = self._buckets(claim.account, claim.model, self._now())
            reply = await attempt(buckets)
            self._server_ahead = cast(int, reply[1]) - round(self._clock.wall() * MICROSECONDS)
            if reply[0] != b"elsewhen":
                return reply, buckets
        raise StateUnavailable("quota: the server's clock does not stand still for one call")

    async def _read(self, account: Account, buckets: Buckets) -> Counters:
        prefix = organisation_prefix(self._namespace, account.organisation.name)
        async with self._client.pipeline(transaction=True) as pipe:
            for bucket in buckets.windows:
                pipe.hmget(prefix + bucket.name, ["ru", "rr", "iu", "ir", "ou", "or"])
            for bucket in buckets.flows:
                pipe.hmget(prefix + bucket.name, ["running", "arrival"])
            rows = cast("list[list[bytes | None]]", await pipe.execute())
        return _counters([int(value or 0) for row in rows for value in row], buckets)

    async def _with_open(self) -> list[str]:
        pattern = organisation_prefix(self._namespace, "*") + "open"
        found = cast("AsyncIterator[bytes]", self._client.scan_iter(match=pattern, count=1000))  # pyright: ignore
        return sorted([key.decode().removesuffix("open") async for key in found])

    async def _call(self, script: str, claim: QuotaClaim, *arguments: str | int) -> list[object]:
        prefix = organisation_prefix(self._namespace, claim.account.organisation.name)
        return cast("list[object]", await self._scripts.call(script, prefix, *arguments))

    def _buckets(self, account: Account, model: str, now: int) -> Buckets:
        return buckets_of(account, model, lambda kind, zone: self._calendar.window(kind, zone, now))

    def _now(self) -> int:
        return round(self._clock.wall() * MICROSECONDS) + self._server_ahead


# --- the scripts' arguments and answers -------------------------------------------------------------------------------


def _who(claim: QuotaClaim) -> str:
    return f"{claim.account.tenant.name}\n{claim.account.key.id}\n{claim.model}"


def _prices(prices: Prices) -> str:
    return f"{prices.input} {prices.cached} {prices.output}"


def _charge_row(charge: Charge) -> tuple[int, ...]:
    return charge.requests, charge.input, charge.cached, charge.output, charge.cost, charge.energy


def _reserve_rows(buckets: Buckets) -> Row:
    rows: Row = [len(buckets.windows), len(buckets.flows)]
    for bucket in buckets.windows:
        rows += [bucket.name, bucket.window.start, bucket.window.end, *_window_limits(bucket)]
    for bucket in buckets.flows:
        rows += [bucket.name, *_flow_limits(bucket)]
    return rows


def _window_limits(bucket: WindowBucket) -> Row:
    """Of requests, input, output, both; then the one to warn of. Shadowed ones are not the script's to enforce."""
    enforced = [None if m in bucket.limits.shadow else bucket.limits.of(m) for m in bucket.metrics]
    if len(enforced) == 1:
        enforced = [None, None, None, *enforced]
    return [*map(_limit, enforced), _limit(bucket.alert_limit)]


def _flow_limits(bucket: FlowBucket) -> Row:
    """Concurrency, burst, and the burst's interval, which is kept up when the burst is only shadowed."""
    limits = bucket.limits
    concurrency = None if Metric.CONCURRENCY in limits.shadow else limits.concurrency
    burst = None if Metric.BURST in limits.shadow else limits.burst
    return [_limit(concurrency), _limit(burst), -1 if limits.burst is None else bucket.interval]


def _limit(limit: int | None) -> int:
    return -1 if limit is None else limit


def _read_reply(reply: list[object], buckets: Buckets) -> tuple[str, int, Cost, Counters]:
    status, now = cast(bytes, reply[0]).decode(), cast(int, reply[1])
    if status == "in_use":
        return status, now, Cost(), Counters((), ())
    numbers = cast("list[int]", reply[2:])
    return status, now, Cost(*numbers[:3]), _counters(numbers[3:], buckets)


def _counters(numbers: Sequence[int], buckets: Buckets) -> Counters:
    """Six numbers a window, two a flow."""
    windows: list[WindowCounters] = []
    for index in range(len(buckets.windows)):
        ru, rr, iu, ir, ou, held_output = numbers[index * 6 : index * 6 + 6]
        windows.append(WindowCounters(Cost(ru, iu, ou), Cost(rr, ir, held_output)))
    rest = numbers[len(buckets.windows) * 6 :]
    flows = [FlowCounters(*rest[index * 2 : index * 2 + 2]) for index in range(len(buckets.flows))]
    return Counters(tuple(windows), tuple(flows))


def _after(buckets: Buckets, before: Counters, cost: Cost, now: int) -> Counters:
    windows = (WindowCounters(held.used, held.reserved + cost) for held in before.windows)
    flows = (
        debited(bucket, flow, cost.requests, now) for bucket, flow in zip(buckets.flows, before.flows, strict=True)
    )
    return Counters(tuple(windows), tuple(flows))
