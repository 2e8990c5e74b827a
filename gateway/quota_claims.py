"""What a request claims of its quotas, and what it was delivered of that. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.types import (
    Account,
    Delivered,
    GenerateChunk,
    GenerateRequest,
    Level,
    Principal,
    QuotaBalance,
    QuotaClaim,
)
from gateway.energy import EnergyRates
from gateway.prices import PriceBook


def claim_of(
    request: GenerateRequest, principal: Principal, prompt_tokens: int, max_tokens: int, prices: PriceBook
) -> QuotaClaim:
    """The prompt once, and the longest answer of every choice. A resumed request claims the same as it did at first."""
    return QuotaClaim(
        request_id=request.request_id,
        owner="",
        account=principal.payer,
        model=request.model,
        input_tokens=prompt_tokens,
        output_tokens=max_tokens * request.n,
        prices=prices.of(request.model),
    )


def enforced(balances: Sequence[QuotaBalance], account: Account) -> tuple[QuotaBalance, ...]:
    """Those of limits that refuse: neither only counted nor in shadow."""
    levels = {Level.ORGANISATION: account.organisation, Level.TENANT: account.tenant, Level.KEY: account.key}

    def refuses(balance: QuotaBalance) -> bool:
        holder = levels[balance.level]
        own = (rule.limits for rule in holder.model_limits if rule.model == balance.model)
        limits = next(own, holder.limits) if balance.model else holder.limits
        return balance.metric not in limits.shadow

    return tuple(balance for balance in balances if balance.limit is not None and refuses(balance))


class Delivery:
    """Adds up what the client got, on this gateway and, as far as it tells, on those before."""

    def __init__(self, request: GenerateRequest, claim: QuotaClaim, energy: EnergyRates) -> None:
        self._input = claim.input_tokens
        self._most = claim.output_tokens
        self._energy = energy
        self._cached = 0
        self._output = sum(map(len, request.resume))
        self._resumed = self._output  # computed by whoever the gateway before asked: as if by the worker that goes on
        self._workers: dict[int, str] = {}  # that decode, by choice
        self._millijoules = 0.0
        self._prompt_counts = True

    def add(self, chunk: GenerateChunk) -> Delivered:
        """With ``chunk``. The prompt counts once, from the first chunk on; choice 0 tells what a cache had of it."""
        self._output += len(chunk.token_ids)
        if chunk.usage is not None and chunk.index == 0:
            self._cached = min(chunk.usage.cached_tokens, self._input)
        self._spend(chunk)
        output = min(self._output, self._most)
        return Delivered(self._input, self._cached, output, energy_millijoules=int(self._millijoules))

    def _spend(self, chunk: GenerateChunk) -> None:
        """Each token by the rate of the worker that computed it."""
        tokens, placed = len(chunk.token_ids), chunk.placement
        if placed is not None:
            self._workers[chunk.index] = placed.decode_worker
            if self._prompt_counts and chunk.index == 0:
                self._prompt_counts = False
                at = placed.prefill_worker or placed.decode_worker
                self._millijoules += self._energy.millijoules(at, self._input - self._cached)
                tokens += self._resumed
        self._millijoules += self._energy.millijoules(self._workers.get(chunk.index, ""), tokens)
