"""Where a request should run: a pure function of the query, a snapshot of the fleet and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.core.errors import InvalidRequest, Overloaded, UnknownModel
from baton.core.types import (
    CachePolicy,
    Candidate,
    Module,
    Plan,
    PlanLimits,
    PlanQuery,
    ProcessRecord,
    Role,
    WorkerState,
)
from services.planner.config import PlannerConfig
from services.planner.fleet import Fleet

Noise = Callable[[], float]  # uniform in [0, 1)


def plan(query: PlanQuery, fleet: Fleet, config: PlannerConfig, noise: Noise) -> Plan:
    """Rank the ready workers that serve the model, least loaded first.

    Raises InvalidRequest for a query that is not complete, UnknownModel when no worker ever served the model, and
    Overloaded when none of those that do is ready (or all of them have failed this request).
    """
    check(query)
    ready = _ready(query, fleet, config)
    window = _window(query, config)
    limits, reasons = limits_for(query, config)
    if config.worker_pools().label_for(query) is not None:
        reasons.append("dedicated_pool")
    if query.tenant_max_blocks is not None:
        reasons.append("tenant_block_cap")
    reasons.append("least_load")
    if window is not None:
        ready, window, reason = _windowed(ready, window, query, config)
        reasons.append(reason)
    decode = [worker for worker in ready if worker.role is Role.DECODE]
    prefill = [worker for worker in ready if worker.role is Role.PREFILL]
    if not decode:
        # The last of a role has its work done by the other one, which then has no hand-over to make.
        decode, prefill = prefill, []
        reasons.append("decode_pool_empty")
    elif not prefill:
        reasons.append("prefill_pool_empty")
    elif free := for_short_answers(decode, prefill, query, config):
        # What it computes stays where it is.
        decode, prefill = free, []
        reasons.append("decode_pool_busy")
    return Plan(
        decode=_ranked(decode, query, fleet, config, noise),
        prefill=_ranked(prefill, query, fleet, config, noise),
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        reasons=tuple(reasons),
        attention_window=window,
        speculation=config.speculation,
        limits=limits,
        cache=cache_for(query, config),
        prefill_wait=config.prefill_wait_ms / 1000 if prefill and _balances(config) else None,
    )


def check(query: PlanQuery) -> None:
    """InvalidRequest naming the first field that cannot be right."""
    for name in ("request_id", "model"):
        if not getattr(query, name):
            raise InvalidRequest.out_of_range(name, repr(getattr(query, name)), "must not be empty")
    for name, least in (("prompt_tokens", 1), ("max_tokens", 1), ("hop", 0)):
        if getattr(query, name) < least:
            raise InvalidRequest.out_of_range(name, getattr(query, name), f"must be at least {least}")
    for name in ("attention_window", "tenant_max_blocks"):
        value = getattr(query, name)
        if value is not None and value < 1:
            raise InvalidRequest.out_of_range(name, value, "must be at least 1")


def limits_for(query: PlanQuery, config: PlannerConfig) -> tuple[PlanLimits, list[str]]:
    """The limits that bind this request, and a reason for each."""
    max_tokens = config.max_tokens if 0 < config.max_tokens < query.max_tokens else None
    max_chunk_tokens = config.max_chunk_tokens if 0 < config.max_chunk_tokens < query.prompt_tokens else None
    seconds = config.max_seconds or None
    limits = PlanLimits(max_tokens, max_chunk_tokens, seconds)
    named = (("max_tokens_limit", max_tokens), ("max_chunk_tokens_limit", max_chunk_tokens), ("time_limit", seconds))
    return limits, [name for name, limit in named if limit is not None]


def cache_for(query: PlanQuery, config: PlannerConfig) -> CachePolicy:
    reached = {priority: cache for priority, cache in config.cache_by_priority().items() if priority <= query.priority}
    return reached[max(reached)] if reached else CachePolicy()


def for_short_answers(
    decode: Sequence[ProcessRecord], prefill: Sequence[ProcessRecord], query: PlanQuery, config: PlannerConfig
) -> list[ProcessRecord]:
    """The prefill workers that have time to give a short answer while every decode worker has too much to do; none
    for other requests and in other cases."""
    if not _balances(config) or query.max_tokens > config.short_answer_tokens:
        return []
    if not all(_has_too_much(worker, config) for worker in decode):
        return []
    return [worker for worker in prefill if not _has_too_much(worker, config) and _has_time(worker, config)]


def load(worker: ProcessRecord, own_tokens: int, in_flight: int) -> float:
    """Tokens that this worker has to hold, as a share of what its pool can hold; above 1 when requests wait.

    Counted in tokens, not requests, so that one long request weighs as much as many short ones. A waiting request
    holds no block yet; it is taken to be as large as the one being placed (``own_tokens``).
    """
    block_size = worker.card.format.block_size if worker.card is not None else 1
    capacity = max(1, worker.stats.total_blocks * block_size)
    tokens = worker.stats.held_blocks * block_size + worker.stats.waiting * own_tokens + in_flight
    return tokens / capacity


def _balances(config: PlannerConfig) -> bool:
    return config.balance and config.local_prefill_max_tokens > 0


def _has_too_much(worker: ProcessRecord, config: PlannerConfig) -> bool:
    """Requests wait for a place, or its answers have become slow. How long its steps took says nothing of a worker that
    has come to rest since, and would say it for as long as nothing is sent there."""
    limit, stats = config.tpot_limit_ms / 1000, worker.stats
    return stats.waiting > 0 or (stats.running > 0 and 0 < limit < stats.decode_step_seconds)


def _has_time(worker: ProcessRecord, config: PlannerConfig) -> bool:
    """A prompt would begin to be computed soon."""
    stats = worker.stats
    return stats.backlog_tokens <= stats.prompt_tokens_per_second * config.prefill_wait_ms / 1000


def _ready(query: PlanQuery, fleet: Fleet, config: PlannerConfig) -> list[ProcessRecord]:
    serving = [worker for worker in fleet.workers if worker.card is not None and worker.card.model == query.model]
    if not serving and query.model not in fleet.known_models:
        raise UnknownModel(f"model: no worker has ever served {query.model!r}")
    ready = [worker for worker in serving if worker.state is WorkerState.READY and worker.id not in query.avoid]
    return _of_pool(ready, query, len(serving), config)


def _of_pool(ready: list[ProcessRecord], query: PlanQuery, serving: int, config: PlannerConfig) -> list[ProcessRecord]:
    """The workers of the tenant's pool and no others, even if there is none; without a pool, those that are in none."""
    pools = config.worker_pools()
    own = [worker for worker in ready if pools.may_use(worker.labels, query)]
    if ready and not own:
        raise Overloaded(
            f"no worker for {query.model} {pools.where(query)} is ready: {len(ready)} are elsewhere",
            retry_after=config.retry_after_seconds,
        )
    if not own:
        raise Overloaded(
            f"no worker for {query.model} is ready: {serving} registered, {len(query.avoid)} to be avoided",
            retry_after=config.retry_after_seconds,
        )
    return own


def _window(query: PlanQuery, config: PlannerConfig) -> int | None:
    """A later hop keeps what the first one was given: another window is another answer."""
    if query.hop:
        return query.attention_window
    return config.attention_window if 0 < config.attention_window < query.prompt_tokens else None


def _windowed(
    ready: list[ProcessRecord], window: int, query: PlanQuery, config: PlannerConfig
) -> tuple[list[ProcessRecord], int | None, str]:
    """The workers that have the module, the window and the reason. A first hop does without if none of them has it."""
    name = Module.ATTENTION_WINDOW
    having = [worker for worker in ready if worker.card is not None and name in worker.card.modules]
    if having:
        return having, window, name
    if query.hop:
        raise Overloaded(f"no ready worker has the module {name}", retry_after=config.retry_after_seconds)
    return ready, None, f"no_{name}"


def _ranked(
    workers: Iterable[ProcessRecord], query: PlanQuery, fleet: Fleet, config: PlannerConfig, noise: Noise
) -> tuple[Candidate, ...]:
    own_tokens = query.prompt_tokens + query.max_tokens

    def cost(worker: ProcessRecord) -> float:
        return load(worker, own_tokens, fleet.in_flight.get(worker.id, 0)) + noise() * config.tie_noise

    best = sorted(workers, key=cost)[: config.max_candidates]
    return tuple(Candidate(worker.id, worker.address, worker.epoch) for worker in best)
