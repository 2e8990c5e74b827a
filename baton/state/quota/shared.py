"""Quotas that all gateways share, in Redis: one atomic script a decision, on the server's own time.

Every key of an organisation has its hash tag, ``<namespace>:{<organisation>}:quota:...``: a claim draws on buckets of
the organisation, the tenant and the key at once, and one script can be atomic over one slot only. So organisations
spread over the shards of a cluster, and one organisation's admissions are bounded by one core of its shard. Days and
months come from the caller, who knows time zones; the script refuses windows that do not hold its own time, and the
caller names them again by the time that the refusal brought. Clocks of gateways may differ as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from redis.asyncio import Redis

from baton.core.clock import Clock
from baton.core.errors import QuotaExceeded, StateUnavailable
from baton.core.streams import closing
from baton.core.types import (
    Account,
    Delivered,
    LeaseState,
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
    FlowCounters,
    WindowBucket,
    WindowCounters,
)
from baton.state.quota.claims import check_claim, member_of, size_in_use
from baton.state.quota.drawing import Drawing, Drawings
from baton.state.quota.keys import organisation_prefix, organisations_with
from baton.state.quota.scripts import Scripts
from baton.state.quota.verdict import balances, judge, undebited
from baton.state.quota.windows import MICROSECONDS, WindowKind
from baton.state.redis_client import Patience, within

DUE_AT_ONCE = 100  # leases that one call ends: a script holds up the server
ATTEMPTS = 3  # a window may end between two of them, not between three
Listener = Callable[[str, Buckets, Counters, int], None]


def nobody(_organisation: str, _buckets: Buckets, _counters: Counters, _now: int) -> None:
    pass


class SharedQuota:
    """Implements ``QuotaApi``. A server that is silent for ``quota_budget_ms`` is StateUnavailable.

    How an admission ended is remembered for ``quota_remember_seconds``, so that telling it again changes nothing.
    ``listener`` is told what the counters stand at, as each claim's answer says it.
    """

    def __init__(self, client: Redis, config: StateConfig, clock: Clock, listener: Listener = nobody) -> None:
        self._client = client
        self._listener = listener
        self._namespace = config.namespace
        self._budget = config.quota_budget_ms / 1000
        self._kept = round(config.quota_remember_seconds * 1000)
        self._clock = clock
        self._server_ahead = 0  # microseconds, as the latest answer told
        self._drawings = Drawings()
        self._scripts = Scripts(client, Patience(self._budget, config.quota_slow_ms / 1000))

    async def reserve(self, claim: QuotaClaim) -> QuotaGrant:
        member, prices = check_claim(claim), claim.prices
        lease = round(claim.lease_seconds * MICROSECONDS)
        size = f"{claim.input_tokens} {claim.output_tokens}"
        rates = f"{prices.input} {prices.cached} {prices.output} {prices.joule}"
        head = (member, claim.owner, *_who(claim), rates, size, lease, self._kept)
        reply, drawing = await self._timely("reserve", claim, head)
        status, now = reply[0], int(reply[1])
        if status == b"in_use":
            raise size_in_use(claim)
        buckets, counters = drawing.buckets, _counters(reply[3:], drawing)
        self._listener(claim.account.organisation.name, buckets, counters, now)
        if status == b"taken":
            return QuotaGrant(balances(buckets, counters, now), taken_over=True)
        cost = Cost(*map(int, reply[2].split()))
        if status == b"refused":
            raise QuotaExceeded.of(judge(buckets, counters, cost, now).refused)
        shadowed = judge(buckets, _before(buckets, counters, cost), cost, now).shadowed if buckets.has_shadow else ()
        return QuotaGrant(balances(buckets, counters, now), shadowed)

    async def renew(self, organisation: str, progress: Sequence[Progress], lease_seconds: float) -> list[LeaseState]:
        rows: list[str] = []
        for each in progress:
            told = each.delivered
            numbers = f"{told.input_tokens} {told.cached_tokens} {told.output_tokens} {told.energy_millijoules}"
            rows += [member_of(each.tenant, each.request_id), each.owner, numbers]
        prefix, lease = organisation_prefix(self._namespace, organisation), round(lease_seconds * MICROSECONDS)
        states = cast("list[bytes]", await self._scripts.call("renew", prefix, lease, *rows))
        return [LeaseState(state.decode()) for state in states]

    async def settle(self, claim: QuotaClaim, delivered: Delivered) -> SettleOutcome:
        total = Charge.of(delivered, claim.prices)
        status = await self._end(claim, total)
        if status == "missing":
            head = (check_claim(claim), claim.owner, *_who(claim), _numbers(total), self._kept)
            reply, _ = await self._timely("charge", claim, head)
            status = reply[0].decode()
        return SettleOutcome(status)

    async def release(self, claim: QuotaClaim) -> SettleOutcome:
        status = await self._end(claim, NO_CHARGE)
        return SettleOutcome.ALREADY if status == "missing" else SettleOutcome(status)

    async def expire(self) -> int:
        """Of every organisation that has reservations, whoever made them. Each of its calls has the budget anew."""
        ended = 0
        found = organisations_with("open", self._client, self._namespace, self._budget)
        async with closing(found) as organisations:
            async for organisation in organisations:
                ended += await self._expire(organisation_prefix(self._namespace, organisation))
        return ended

    async def balances(self, account: Account, model: str) -> tuple[QuotaBalance, ...]:
        now = self._now()
        drawing = self._drawings.of(account, model, now)
        counters = await within(self._read(account, drawing), self._budget, "read quota counters")
        return balances(drawing.buckets, counters, now)

    async def _expire(self, prefix: str) -> int:
        ended, found = 0, DUE_AT_ONCE
        while found == DUE_AT_ONCE:
            found = cast(int, await self._scripts.call("expire", prefix, DUE_AT_ONCE))
            ended += found
        return ended

    # --- parts of a call --------------------------------------------------------------------------------------------

    async def _end(self, claim: QuotaClaim, total: Charge) -> str:
        prefix = organisation_prefix(self._namespace, claim.account.organisation.name)
        arguments = (check_claim(claim), claim.owner, _numbers(total), self._kept)
        return cast(bytes, await self._scripts.call("settle", prefix, *arguments)).decode()

    async def _timely(self, script: str, claim: QuotaClaim, head: tuple[str | int, ...]) -> tuple[list[bytes], Drawing]:
        """Call a script with windows that hold the server's time; its answer's lines, and what it was about."""
        prefix = organisation_prefix(self._namespace, claim.account.organisation.name)
        for _ in range(ATTEMPTS):
            drawing = self._drawings.of(claim.account, claim.model, self._now())
            answer = await self._scripts.call(script, prefix, *head, drawing.drawn, drawing.plan)
            reply = cast(bytes, answer).split(b"\n")
            self._server_ahead = int(reply[1]) - round(self._clock.wall() * MICROSECONDS)
            if reply[0] != b"elsewhen":
                return reply, drawing
        raise StateUnavailable("quota: the server's clock jumps")

    async def _read(self, account: Account, drawing: Drawing) -> Counters:
        prefix = organisation_prefix(self._namespace, account.organisation.name)
        async with self._client.pipeline(transaction=True) as pipe:
            for scope, buckets in drawing.buckets.scopes:
                pipe.hmget(prefix + scope.name, [bucket.field for bucket in buckets])
            rows = cast("list[list[bytes | None]]", await pipe.execute())
        return _counters([value or b"" for row in rows for value in row], drawing)

    def _now(self) -> int:
        return round(self._clock.wall() * MICROSECONDS) + self._server_ahead


# --- the scripts' arguments and answers -------------------------------------------------------------------------------


def _who(claim: QuotaClaim) -> tuple[str, str, str]:
    return claim.account.tenant.name, claim.account.key.id, claim.model


def _numbers(charge: Charge) -> str:
    return f"{charge.requests} {charge.input} {charge.cached} {charge.output} {charge.cost} {charge.energy}"


def _counters(values: Sequence[bytes], drawing: Drawing) -> Counters:
    """From the fields' values in the order of the drawing; an empty one was never written."""
    windows: list[WindowCounters] = []
    flows: list[FlowCounters] = []
    drawn = (bucket for _, buckets in drawing.buckets.scopes for bucket in buckets)
    for bucket, value in zip(drawn, values, strict=True):
        if isinstance(bucket, WindowBucket):
            windows.append(_window_counters(bucket.window.kind, value) if value else WindowCounters())
        else:
            flows.append(FlowCounters(*map(int, value.split())))
    return Counters(tuple(windows), tuple(flows))


def _window_counters(kind: WindowKind, value: bytes) -> WindowCounters:
    """A counter's total is what was used and what is reserved; the other numbers of a day or month are of alerts."""
    if kind is WindowKind.MINUTE:
        requests, prompts, answers, requests_used, prompts_used, answers_used = map(int, value.split())
        reserved = Cost(requests - requests_used, prompts - prompts_used, answers - answers_used)
        return WindowCounters(Cost(requests_used, prompts_used, answers_used), reserved)
    total, _, tokens_used, _ = map(int, value.split())
    return WindowCounters(Cost(0, tokens_used), Cost(0, total - tokens_used))


def _before(buckets: Buckets, after: Counters, cost: Cost) -> Counters:
    """The counters that a grant was judged by."""
    windows = (WindowCounters(held.used, held.reserved.less(cost)) for held in after.windows)
    flows = (undebited(bucket, flow, cost.requests) for bucket, flow in zip(buckets.flows, after.flows, strict=True))
    return Counters(tuple(windows), tuple(flows))
