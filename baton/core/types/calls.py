"""What one process asks of another: the gateway of a decode worker, a decode worker of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.types.fleet import Candidate
from baton.core.types.tokens import FirstToken, TokenRequest
from baton.core.types.transfer import Ticket


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What the gateway sends to a decode worker. ``prefill_wait``: see ``Plan``."""

    tokens: TokenRequest
    prefill: tuple[Candidate, ...] = ()
    local_prefill_max_tokens: int = 0
    prefill_wait: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """What a decode worker sends to a prefill worker. ``skip_blocks``: leading blocks, of its own size, that the
    receiver already holds. ``max_wait``: seconds after which its computation should begin, else the answer is ``Busy``;
    None: any.
    """

    tokens: TokenRequest
    ticket: Ticket
    skip_blocks: int = 0
    max_wait: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    first: FirstToken
    worker_id: str
    kv_bytes: int
