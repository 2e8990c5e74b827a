"""The nouns of Baton. Frozen, validated where they enter the system, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a process mostly does. Every worker is able to do both kinds of work; the role says which it is sent."""

    GATEWAY = "gateway"
    PLANNER = "planner"
    PREFILL = "prefill"
    DECODE = "decode"
    KVTRANSFER = "kvtransfer"


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"


class PrefillMode(StrEnum):
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """Which go at a request this is: ``hop`` is minted by the gateway, ``retry`` by the decode worker."""

    hop: int = 0
    retry: int = 0

    def __str__(self) -> str:
        return f"{self.hop}.{self.retry}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. The defaults draw greedily.

    Penalties follow the common meaning: ``repetition`` (Keskar et al. 2019) divides or multiplies the logits of tokens
    in prompt and output; ``presence`` and ``frequency`` are subtracted once, or per occurrence, for output tokens only.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StopRules:
    """When generation ends, as far as the engine knows: by ids and counts. Stop strings live in the gateway."""

    max_tokens: int = 16
    min_tokens: int = 0  # EOS and stop ids cannot be drawn before this many output tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the raw distribution, with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """``cached_tokens`` is the part of the prompt that was found in a prefix cache: prefill's truth."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request as the workers know it: ids only, one choice (n > 1 is fanned out by the gateway).

    ``generated`` holds the output ids of earlier hops. Positions, penalties, limits and stop state are rebuilt from
    them; they count towards ``max_tokens`` and are not delivered again.
    """

    request_id: str
    prompt: tuple[int, ...]
    model: str = ""
    attempt: Attempt = Attempt()
    generated: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    stop: StopRules = StopRules()
    logprobs: int | None = None  # None: none; 0: the drawn token only; n: with the n likeliest
    prompt_logprobs: int | None = None
    priority: int = 0  # higher goes first
    tenant: str = ""
    salt: bytes = b""
    timeout: float | None = None  # seconds left when it was sent

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV must exist before the next token can be drawn."""
        return len(self.prompt) + len(self.generated)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request was computed, for the client's eyes. ``kv_bytes`` is what was shipped for it."""

    decode_worker: str = ""
    prefill_worker: str = ""
    prefill_mode: PrefillMode = PrefillMode.LOCAL
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one engine step added to one request. The last chunk has ``finish``; the first has ``usage``, ``placement``.

    ``prompt_logprobs`` has one entry a prompt token, the first None; only in the first chunk, when asked for.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The result of prefill: the first output token and all that belongs to it. ``finish`` set: it was the last."""

    token_id: int
    usage: Usage
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None


# --- KV transfer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How KV bytes are laid out. Two pools may exchange blocks only if all of this is equal."""

    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    layout: str = "block-major/1"

    @property
    def block_bytes(self) -> int:
        width = {"float32": 4, "bfloat16": 2, "float16": 2, "fake": 1}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_dim * width

    def __str__(self) -> str:
        shape = f"{self.layers}x2x{self.kv_heads}x{self.block_size}x{self.head_dim}"
        return f"{self.layout}:{self.dtype}:{shape}"


@dataclass(frozen=True, slots=True)
class KvHandshake:
    """Says who speaks and what it can do; compared field by field, a difference is refused by name."""

    worker_id: str
    epoch: int
    model: str
    weights_hash: str
    format: KvFormat
    protocol_version: int = 1
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill one reservation's blocks: dies with the decode call that made it."""

    request_id: str
    attempt: Attempt
    receiver_address: str
    receiver_epoch: int


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Consecutive KV blocks of one request, as bytes in the pool's layout; unused token slots at the end are left out.

    ``first_block`` is the ordinal in the sequence (block 0 holds positions 0..block_size-1), ``checksums`` one 128-bit
    digest a block (empty when policy turns them off).
    """

    ticket: Ticket
    first_block: int
    block_count: int
    payload: bytes
    checksums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class KvConfirmation:
    """The sender's answer to an acknowledgement: the offered blocks were still pinned when it came."""

    ticket: Ticket
    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class FilledBlocks:
    """Blocks of a prefill in progress whose KV is complete; ``tokens`` is the prompt position reached."""

    first_block: int
    block_count: int
    tokens: int


# --- fleet ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a worker serves."""

    model: str
    architecture: str
    context_length: int
    vocab_size: int
    weights_hash: str
    format: KvFormat
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine. Blocks: free + held + cached = total, always. Counters only grow."""

    total_blocks: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    waiting: int = 0
    running: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    preemptions: int = 0


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One registered process. Addresses are ``host:port``; ``card`` and ``stats`` only for workers.

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranked candidates and directives. Complete or refused: an empty ``decode`` is never sent.

    The decode worker computes the prompt itself when its uncached part has at most ``local_prefill_max_tokens`` tokens
    (0: never), else asks the ``prefill`` candidates in order.
    """

    decode: tuple[Candidate, ...]
    prefill: tuple[Candidate, ...]
    local_prefill_max_tokens: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What the gateway sends to a decode worker."""

    tokens: TokenRequest
    prefill: tuple[Candidate, ...] = ()
    local_prefill_max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """What a decode worker sends to a prefill worker. ``skip_blocks``: leading blocks the receiver already holds."""

    tokens: TokenRequest
    ticket: Ticket
    skip_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PrefillResult:
    first: FirstToken
    worker_id: str
    kv_bytes: int


# --- the door ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a client asks of the gateway: exactly one of ``text``, ``prompt_token_ids`` and ``messages``.

    ``request_id`` set makes the call idempotent: a second call with the same id takes the request over. ``resume``
    holds, per choice, the ids that the client already has (client-side resume after a gateway's death).
    """

    model: str = ""
    text: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    sampling: Sampling = Sampling()
    seed: int | None = None  # overrides sampling.seed; None: the gateway mints one
    stop: StopRules = StopRules()
    max_tokens: int | None = None  # overrides stop.max_tokens; None: the gateway's default, at most what fits
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    request_id: str = ""
    resume: tuple[tuple[int, ...], ...] = ()
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """A piece of the answer for choice ``index``. The last chunk of a choice has ``finish`` and ``usage``.

    ``text`` may lag behind ``token_ids`` (bytes split over tokens, possible stop strings); ``migrations`` counts hops.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    placement: Placement | None = None
    migrations: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What ListModels tells about one model of the fleet."""

    model: str
    architecture: str
    context_length: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    workers: int


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling: made by the gateway from an API key, never by a client."""

    tenant: str
    key_id: str
    salt: bytes = field(default=b"", repr=False)
