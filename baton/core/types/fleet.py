"""Processes, what they serve and how busy they are; plans that choose among them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.core.types.tenancy import Tier
from baton.core.types.tier import TierStats
from baton.core.types.tokens import CachePolicy
from baton.core.types.transfer import KvFormat


class Role(StrEnum):
    """What a process mostly does. Every worker is able to do both kinds of work; the role says which it is sent."""

    GATEWAY = "gateway"
    PLANNER = "planner"
    PREFILL = "prefill"
    DECODE = "decode"
    KVTRANSFER = "kvtransfer"


class Module(StrEnum):
    """A way to compute that a request may ask for and that not every worker has."""

    ATTENTION_WINDOW = "attention_window"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a worker serves. ``modules``: names of ``Module`` that it has; a newer worker may have others."""

    model: str
    architecture: str
    context_length: int
    vocab_size: int
    weights_hash: str
    format: KvFormat
    eos_token_ids: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What one tier of tenants has of a worker. ``running`` requests hold blocks, ``waiting`` ones none; ``blocks``
    counts those that two tenants share for both; ``backlog_tokens`` is its part of those of ``EngineStats``."""

    tier: Tier
    tenants: int = 0  # with requests here
    waiting: int = 0
    running: int = 0
    blocks: int = 0
    preemptions: int = 0
    backlog_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine. Blocks: free + held + cached = total, always; ``kept_blocks`` of the cached ones are of
    class ``keep``. Counters only grow.

    ``host_seconds`` is the engine loop's own work, all but waiting for commands and for the device. ``device_seconds``
    is from each step's start on the device to its end, ``device_idle_seconds`` between the end of one step and the
    start of the next while there was work; both are 0 where the host computes. ``energy_joules`` is what the worker's
    GPU has used since the engine started, idle or not; 0 where nothing measures it.

    ``backlog_tokens`` are of admitted prompts and not computed yet. A prompt that came now would be computed at
    ``prompt_tokens_per_second``, beside the answers that go on; steps of answers alone take ``decode_step_seconds``.
    Both as measured of late, 0: not yet.
    """

    total_blocks: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    kept_blocks: int = 0
    waiting: int = 0
    running: int = 0
    backlog_tokens: int = 0
    prompt_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    device_idle_seconds: float = 0.0
    energy_joules: float = 0.0
    draft_tokens_proposed: int = 0
    draft_tokens_accepted: int = 0
    tiers: tuple[TierLoad, ...] = ()  # of tenants, from the highest down; of those that ever had a request here

    def backlog_before(self, tier: Tier) -> int:
        """The part of ``backlog_tokens`` that goes before a prompt of ``tier`` that came now: its own tier's and that
        of higher ones. Lower ones get what these leave, and a share by weight once a tier has had what is reserved."""
        return sum(load.backlog_tokens for load in self.tiers if not load.tier.is_below(tier))


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One registered process. Addresses are ``host:port``; ``card`` and ``stats`` only for workers, ``tier`` only for
    the cache tier.

    ``beats`` counts how often the record was written: two records of one process with other beats are two looks at it.
    """

    id: str
    role: Role
    address: str
    epoch: int
    pid: int
    http_address: str = ""
    state: WorkerState = WorkerState.LOADING
    card: ModelCard | None = None
    stats: EngineStats = EngineStats()
    tokens_per_second: float = 0.0
    beats: int = 0
    labels: tuple[str, ...] = ()  # of a worker: pools that it belongs to
    pools: tuple[str, ...] = ()  # of a planner: its map of tenants and tiers to labels, see baton.core.pools
    tier: TierStats | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that a plan names."""

    worker_id: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """The features of a request that placement depends on; never its text."""

    request_id: str
    model: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    hop: int = 0
    priority: int = 0
    avoid: tuple[str, ...] = ()  # worker ids that this request has seen fail
    attention_window: int | None = None  # of an earlier hop, which a later one must keep
    tier: Tier = Tier.BRONZE
    pool: str = ""  # of the tenant: label of the workers for it; empty: as the planner is set
    tenant_max_blocks: int | None = None  # see TokenRequest


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Bounds that a plan sets to its request, beside the request's own; None: none. They lower and never raise.

    ``seconds`` count from the arrival of the plan. ``max_chunk_tokens`` bounds what a step computes of the prompt, so
    that a long one does not stall those who share its steps.
    """

    max_tokens: int | None = None
    max_chunk_tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranked candidates and directives. Complete or refused: an empty ``decode`` is never sent.

    The decode worker computes the prompt itself when its uncached part has at most ``local_prefill_max_tokens`` tokens
    (0: never), else asks the ``prefill`` candidates in order. ``prefill_wait`` is the balance between the two: a prompt
    that would wait for longer than so many seconds at every candidate is computed by the decode worker if that is
    sooner; None: it waits. ``attention_window`` goes into the request; every
    candidate has its module. ``limits`` and ``cache`` of a request's first plan hold for its later hops too. A limit
    that a plan sets has its reason ("max_tokens_limit", "max_chunk_tokens_limit", "time_limit") in ``reasons``.
    """

    decode: tuple[Candidate, ...]
    prefill: tuple[Candidate, ...]
    local_prefill_max_tokens: int
    reasons: tuple[str, ...] = ()
    attention_window: int | None = None
    speculation: bool = True  # drafts may be tried where the engine does so
    limits: PlanLimits = PlanLimits()
    cache: CachePolicy = CachePolicy()
    prefill_wait: float | None = None
