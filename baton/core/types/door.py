"""What clients ask of the gateway, and what they get."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.types.quota import QuotaBalance
from baton.core.types.tenancy import Account, KeyRecord, Organisation, Tenant
from baton.core.types.tokens import FinishReason, Placement, Sampling, StopRules, TokenLogprob, Usage

MAX_REQUEST_ID = 128  # characters


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
    ``quota``, with an answer's first chunk: what is left of the limits that hold for the caller.
    ``limit`` names what ended an answer with finish ``length`` when it was not the request's own limit but one that the
    plan set ("max_tokens").
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
    quota: tuple[QuotaBalance, ...] = ()
    limit: str = ""


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
    """Who is calling: made by the gateway from an API key, never by a client. Higher ``priority`` is served first among
    the tenant's requests.

    ``account`` None: nobody has recorded this tenant, so nothing limits it but our capacity.
    """

    tenant: str
    key_id: str
    salt: bytes = field(default=b"", repr=False)
    priority: int = 0
    account: Account | None = None

    @property
    def payer(self) -> Account:
        """Whose quotas the caller's requests draw on."""
        if self.account is not None:
            return self.account
        unlimited = Tenant(self.tenant, organisation=self.tenant)
        return Account(Organisation(self.tenant), unlimited, KeyRecord(self.key_id, self.tenant, "", ""))
