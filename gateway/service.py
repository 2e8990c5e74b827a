"""The gateway as a whole: one request from its bounds to its last chunk. Implements ``GatewayApi``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from baton.core.clock import Ids
from baton.core.deadline import Deadline
from baton.core.errors import InvalidRequest, PermissionDenied, QuotaExceeded, StateUnavailable, UnknownModel
from baton.core.streams import closing
from baton.core.tenancy import allows_model
from baton.core.types import (
    MAX_REQUEST_ID,
    GenerateChunk,
    GenerateRequest,
    ModelCard,
    ModelInfo,
    PlanQuery,
    Principal,
    QuotaClaim,
    TokenRequest,
)
from gateway.admission import Admission
from gateway.choice import ChoiceOrder, ChoiceProgress
from gateway.fanout import ChoiceStream, choice_seed, fan_out, request_seed
from gateway.fleet import FleetView
from gateway.grant import Grant
from gateway.meters import RequestMeters
from gateway.prices import PriceBook
from gateway.prompt import Prompts
from gateway.quota_claims import Delivery, claim_of, enforced
from gateway.refusal_log import RefusalLog
from gateway.relay import Relay
from gateway.running import RunningRequests
from gateway.validate import Limits, check_prompt, check_request, check_token_ids, fit_max_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What a gateway is joined from."""

    fleet: FleetView
    prompts: Prompts
    admission: Admission
    refusals: RefusalLog
    prices: PriceBook
    relay: Relay
    running: RunningRequests
    meters: RequestMeters
    ids: Ids


@dataclass(frozen=True, slots=True)
class GatewayPolicy:
    """``default_timeout``: seconds for a call without a deadline. ``default_model``: for a call that names none."""

    limits: Limits = field(default_factory=Limits)
    default_timeout: float = 600.0
    default_model: str = ""


class Gateway:
    def __init__(self, parts: GatewayParts, policy: GatewayPolicy) -> None:
        self._parts = parts
        self._policy = policy

    @property
    def running(self) -> int:
        """Requests in progress."""
        return self._parts.running.count

    async def generate(self, request: GenerateRequest, principal: Principal) -> AsyncIterator[GenerateChunk]:
        """Stream every choice to its last chunk; a later call with the same request id ends this one with Cancelled."""
        request = replace(request, request_id=request.request_id or self._parts.ids.request_id())
        subject = {"request_id": request.request_id[:MAX_REQUEST_ID], "tenant": principal.tenant}
        with self._parts.meters.request(request.model, subject) as record:
            check_request(request, self._policy.limits)
            record.model = self._model_name(request.model, principal)
            request = replace(request, model=record.model)
            deadline = Deadline.after(self._policy.default_timeout if request.timeout is None else request.timeout)
            async with self._parts.running.own(principal.tenant, request.request_id, deadline):
                claim, choices = await self._prepared(request, principal, deadline)
                async with self._admitted(claim, deadline) as grant, closing(fan_out(choices)) as chunks:
                    delivery = Delivery(request, claim, self._parts.fleet.energy)
                    balances = enforced(grant.balances, claim.account)
                    async for chunk in chunks:
                        grant.note(delivery.add(chunk))
                        self._parts.meters.note(record, chunk)
                        yield replace(chunk, quota=balances) if balances else chunk
                        balances = ()
                        grant.written()  # or we would not have been asked for more

    async def count_tokens(self, request: GenerateRequest, principal: Principal) -> tuple[int, ...]:
        check_prompt(request, self._policy.limits)
        card = self._card(self._model_name(request.model, principal), principal)
        return await self._parts.prompts.prompt_ids(request, card)

    async def list_models(self, principal: Principal) -> Sequence[ModelInfo]:
        return [await self.get_model(name, principal) for name in self._served(principal)]

    async def get_model(self, model: str, principal: Principal) -> ModelInfo:
        card = self._card(self._model_name(model, principal), principal)
        text = self._parts.prompts.text_of(card.model)
        return ModelInfo(
            model=card.model,
            architecture=card.architecture,
            context_length=card.context_length,
            vocab_size=card.vocab_size,
            has_tokenizer=text is not None,
            has_chat_template=text is not None and text.render is not None,
            workers=len(self._parts.fleet.ready(card.model)),
        )

    def _model_name(self, asked: str, principal: Principal) -> str:
        """Raises InvalidRequest when none is named and the caller may use several."""
        if asked or self._policy.default_model:
            return asked or self._policy.default_model
        served = self._served(principal)
        if len(served) == 1:
            return served[0]
        raise InvalidRequest(f"model: must be named, one of {', '.join(served) or 'none served yet'}", field="model")

    def _card(self, model: str, principal: Principal) -> ModelCard:
        """Raises PermissionDenied before UnknownModel, so that a key learns nothing of models that it may not use."""
        if not allows_model(principal.payer, model):
            raise PermissionDenied(f"model: key {principal.key_id!r} may not use {model!r}")
        card = self._parts.fleet.card(model)
        if card is None:
            served = ", ".join(self._served(principal)) or "none served yet"
            raise UnknownModel(f"model: must be one of {served}, got {model!r:.100}")
        return card

    def _served(self, principal: Principal) -> tuple[str, ...]:
        """The models that the caller may use, and no other name.

        Raises StateUnavailable while the fleet is not known: then no name is known to be wrong.
        """
        if not self._parts.fleet.known:
            raise StateUnavailable("the gateway does not know the fleet yet: the registry has not answered")
        return tuple(name for name in self._parts.fleet.models if allows_model(principal.payer, name))

    @asynccontextmanager
    async def _admitted(self, claim: QuotaClaim, deadline: Deadline) -> AsyncIterator[Grant]:
        try:
            async with self._parts.admission.admitted(claim, deadline) as grant:
                yield grant
        except QuotaExceeded as error:
            self._parts.refusals.note(claim, error)
            raise

    async def _prepared(
        self, request: GenerateRequest, principal: Principal, deadline: Deadline
    ) -> tuple[QuotaClaim, list[ChoiceStream]]:
        card = self._card(request.model, principal)
        prompt = await deadline.within(self._parts.prompts.prompt_ids(request, card), "the tokenizer")
        check_token_ids(request, prompt, card)
        max_tokens = fit_max_tokens(request, len(prompt), card, self._policy.limits)
        tenant = principal.payer.tenant
        query = PlanQuery(
            request.request_id,
            card.model,
            principal.tenant,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            priority=principal.priority,
            tier=tenant.tier,
            pool=tenant.pool,
            tenant_max_blocks=tenant.max_kv_blocks,
        )
        eos = frozenset[int]() if request.stop.ignore_eos else frozenset(card.eos_token_ids)
        base = TokenRequest(
            request_id=request.request_id,
            prompt=prompt,
            model=card.model,
            sampling=request.sampling,
            stop=replace(request.stop, max_tokens=max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=principal.priority,
            tenant=principal.tenant,
            tier=tenant.tier,
            tenant_max_blocks=tenant.max_kv_blocks,
            salt=principal.salt,
        )
        streams: list[ChoiceStream] = []
        for index in range(request.n):
            resumed = request.resume[index] if index < len(request.resume) else ()
            order = ChoiceOrder(request.request_id, index, _choice_request(request, base, index, resumed), eos)
            progress = ChoiceProgress(order, self._parts.prompts.text_stream(card.model, request), resumed)
            streams.append(partial(self._parts.relay.stream, progress, query, deadline))
        return claim_of(request, principal, len(prompt), max_tokens, self._parts.prices), streams


def _choice_request(request: GenerateRequest, base: TokenRequest, index: int, resumed: Sequence[int]) -> TokenRequest:
    """Workers know each choice, and each resumption of it, as a request of its own: its KV tickets must not meet those
    of the call that a dead gateway may have left behind."""
    seed = request_seed(base.tenant, request.request_id) if request.seed is None else request.seed
    resumption = f"+{len(resumed)}" if resumed else ""
    return replace(
        base,
        request_id=f"{request.request_id}{resumption}" + (f"/{index}" if index else ""),
        sampling=replace(base.sampling, seed=choice_seed(seed, index)),
        prompt_logprobs=base.prompt_logprobs if index == 0 else None,
    )
