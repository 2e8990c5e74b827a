"""Requests and answers as the workers know them: token ids, how to draw them, what came out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.core.types.tenancy import Tier


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"


class PrefillMode(StrEnum):
    LOCAL = "local"
    REMOTE = "remote"


class CacheClass(StrEnum):
    """How a full block is kept in a prefix cache once nobody uses it."""

    NONE = "none"  # not at all: no later request finds it
    NORMAL = "normal"  # least recently used goes first
    KEEP = "keep"  # goes after all normal ones; there is room for a share of the pool (engine.cache_keep_share)


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How a request's full blocks are kept: those of the prompt's ``keep_tokens`` leading tokens as ``keep``, all
    others as ``cache_class``.

    Tokens and block hashes do not depend on it, and the request hits what is cached already whatever it says.
    """

    cache_class: CacheClass = CacheClass.NORMAL
    keep_tokens: int = 0


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

    @property
    def has_penalties(self) -> bool:
        """A draw depends on which tokens came before it, not on their number alone."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


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
    priority: int = 0  # higher goes first among its tenant's
    # Whose share of a worker it uses, and what that is; set by the gateway and nobody else, as the salt is.
    tenant: str = ""
    tier: Tier = Tier.BRONZE
    tenant_max_blocks: int | None = None  # KV blocks that the tenant may hold of a worker; None: as the worker is set
    salt: bytes = b""
    timeout: float | None = None  # seconds left when it was sent
    attention_window: int | None = None  # a token sees so many at most, itself included; None: as the model does
    speculation: bool = True  # drafts may be tried where the engine does so; they change no token
    max_chunk_tokens: int | None = None  # of its context, computed in one step; None: what a step has room for
    cache: CachePolicy = CachePolicy()

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
    """What an engine step added to one request, or several steps for a reader that is behind. The last chunk has
    ``finish``; the first has ``usage``, ``placement``.

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
