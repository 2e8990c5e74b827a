"""Who has had how much of an engine: token counters, places and blocks of each tenant and tier. Pure bookkeeping.

Counters are the virtual ones of Sheng et al. 2024 ("Fairness in Serving Large Language Models"): a tenant is charged
the prompt tokens that were computed for it and the tokens that were drawn for it, each kind with its weight, and
whoever was charged least goes first. A tenant that comes back to a busy engine is lifted to the least counter of those
who have work, so idling saves nothing up. Tiers have such counters too, divided by the tier's weight.

What was admitted and is not computed yet is *promised*: it counts when places are given, so that one tenant does not
get all that are free at one moment, and not when the tokens of a step are divided.

Charging is lazy: ``settle`` is called where a counter is about to be compared, never for a step's rows.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from baton.core.types import Tier, TierLoad
from baton.engine.config import EngineConfig
from baton.engine.sequence import Sequence
from baton.engine.share import NEVER, BlockCap, TenantShare, TierShare
from baton.engine.tiers import PLACE

MAX_IDLE_TENANTS = 4096  # whose counters are remembered


class FairShares:
    """The shares of all tenants that have requests here, and of those who had some lately."""

    def __init__(self, config: EngineConfig, total_blocks: int, places: int) -> None:
        """``places``: sequences that may be admitted at once."""
        policies = config.tier_policies()
        self.tiers = tuple(TierShare(tier, policies[tier], PLACE[tier]) for tier in Tier)
        self._total_blocks = total_blocks
        self._places = places
        self._tenant_blocks = math.floor(config.tenant_block_share * total_blocks)
        self._reserve_idle = config.reserve_idle_seconds
        self._prompt_weight = config.prompt_token_weight
        self._output_weight = config.output_token_weight
        self._idle: OrderedDict[tuple[Tier, str], TenantShare] = OrderedDict()
        self._last = 0.0  # counter of the tier that was served last

    # --- coming and going ---------------------------------------------------------------------------------------------

    def join(self, sequence: Sequence) -> TenantShare:
        """The sequence now belongs to its tenant's share, whose ``live`` counts it until it leaves."""
        tier, tenant = self.tiers[PLACE[sequence.request.tier]], sequence.request.tenant
        share = tier.tenants.get(tenant)
        if share is None:
            share = self._idle.pop((tier.tier, tenant), None) or TenantShare(tenant, tier)
            tier.tenants[tenant] = share
        share.live += 1
        tier.live += 1
        share.cap = self._cap(sequence.request.tenant_max_blocks)
        sequence.share = share
        return share

    def leave(self, sequence: Sequence, now: float) -> None:
        """The sequence has ended and holds nothing any more."""
        share, tier = sequence.share, sequence.share.tier
        share.live -= 1
        tier.live -= 1
        tier.left_at = now
        if not share.live:
            del tier.tenants[share.tenant]
            self._idle[tier.tier, share.tenant] = share
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._idle.popitem(last=False)

    def lift(self, share: TenantShare) -> None:
        """The tenant has had no work waiting until now. Counters of those who run must be settled."""
        tier = share.tier
        if not share.is_backlogged:
            backlogged = [other.counter for other in tier.tenants.values() if other.is_backlogged]
            share.counter = max(share.counter, min(backlogged, default=tier.last))
        if not tier.is_backlogged:
            backlogged = [other.counter for other in self.tiers if other.is_backlogged]
            tier.counter = max(tier.counter, min(backlogged, default=self._last))

    def loads(self, backlog: Mapping[Tier, int]) -> tuple[TierLoad, ...]:
        """What there is of each tier that ever had a request here, from the highest down. ``backlog`` in tokens."""
        return tuple(
            TierLoad(
                tier=tier.tier,
                tenants=len(tier.tenants),
                waiting=tier.waiting,
                running=tier.places,
                blocks=tier.blocks,
                preemptions=tier.preemptions,
                backlog_tokens=backlog.get(tier.tier, 0),
            )
            for tier in self.tiers
            if tier.live or tier.left_at > NEVER
        )

    def _cap(self, recorded: int | None) -> BlockCap | None:
        """The lower of what a tenant's record and the engine's settings say; None: the pool is the limit."""
        caps = [BlockCap(self._tenant_blocks, "engine.tenant_block_share")]
        if recorded is not None:
            caps.append(BlockCap(recorded, "max_kv_blocks"))
        lowest = min(caps)
        return lowest if lowest.blocks < self._total_blocks else None

    # --- blocks and places --------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, *, is_fixed: bool) -> None:
        """The sequence has been given its blocks. ``is_fixed``: it cannot be made to give them back."""
        share, tier = sequence.share, sequence.share.tier
        tier.last = max(tier.last, share.counter)
        self._last = max(self._last, tier.counter)
        tier.blocks += share.hold(sequence.blocks)
        tier.places += 1
        sequence.charged_to = max(sequence.charged_to, sequence.launched)
        self._promise(sequence, max(0, sequence.first_output - sequence.charged_to))
        if is_fixed:
            sequence.fixed_blocks = len(sequence.blocks)
            tier.fixed_blocks += sequence.fixed_blocks
            tier.fixed_places += 1

    def unfix(self, sequence: Sequence) -> None:
        """The sequence may be preempted from now on."""
        if sequence.fixed_blocks:
            sequence.share.tier.fixed_blocks -= sequence.fixed_blocks
            sequence.share.tier.fixed_places -= 1
            sequence.fixed_blocks = 0

    def grow(self, sequence: Sequence, block: int) -> None:
        """The sequence has been given a block that nobody else has."""
        share = sequence.share
        share.blocks[block] = 1
        share.tier.blocks += 1

    def give_back(self, sequence: Sequence) -> None:
        """Before an admitted sequence gives up its blocks, for good or for now."""
        self.settle((sequence,))
        self.unfix(sequence)
        self._promise(sequence, 0)
        sequence.share.tier.blocks -= sequence.share.let_go(sequence.blocks)
        sequence.share.tier.places -= 1

    # --- tokens -------------------------------------------------------------------------------------------------------

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """Charge what was computed and drawn for each since the last time; nothing twice that is recomputed."""
        for sequence in sequences:
            cost = 0.0
            prompt = min(sequence.launched, sequence.first_output) - sequence.charged_to
            if prompt > 0:
                sequence.charged_to += prompt
                cost += prompt * self._prompt_weight
            drawn = len(sequence.context) - sequence.first_output - sequence.charged_output
            if drawn > 0:
                sequence.charged_output += drawn
                cost += drawn * self._output_weight
            if cost:
                sequence.share.charge(cost)
            if sequence.promised:
                self._promise(sequence, max(0, sequence.first_output - sequence.charged_to))

    def _promise(self, sequence: Sequence, tokens: int) -> None:
        share, change = sequence.share, tokens - sequence.promised
        if change:
            sequence.promised = tokens
            share.promise(change, change * self._prompt_weight)

    # --- what a tier or a tenant may have -----------------------------------------------------------------------------

    def has_claim(self, tier: TierShare, wanted: int) -> bool:
        """Another request of ``wanted`` blocks is within the tier's reserved share. Its first one always is."""
        reserved = tier.policy.reserved_share
        if not tier.places:
            return reserved > 0
        return tier.places + 1 <= reserved * self._places and tier.blocks + wanted <= reserved * self._total_blocks

    def is_borrowing(self, tier: TierShare, places: int, blocks: int) -> bool:
        """The tier, once it has given back ``places`` and ``blocks``, still has more than is reserved for it."""
        reserved = tier.policy.reserved_share
        return tier.places - places > reserved * self._places or tier.blocks - blocks > reserved * self._total_blocks

    def borrowing_below(self, tier: TierShare) -> list[TierShare]:
        """Lower tiers that have more than is reserved for them."""
        return [other for other in self.tiers[tier.place + 1 :] if self.is_borrowing(other, 0, 0)]

    def leaves_room(self, tier: TierShare, wanted: int, now: float, *, is_fixed: bool) -> bool:
        """Once ``wanted`` blocks are given to the tier, every other tier can still get what is reserved for it.

        A tier gets back what tiers below it have borrowed and what can be preempted; nothing else. Tiers that nobody
        has used for ``reserve_idle_seconds`` reserve nothing. The first request of a tier is always let in.
        """
        if not tier.places:
            return True
        return all(
            other is tier or self._can_reclaim(other, tier, wanted, is_fixed=is_fixed)
            for other in self.tiers
            if other.policy.reserved_share and other.is_present(now, self._reserve_idle)
        )

    def _can_reclaim(self, owner: TierShare, taker: TierShare, wanted: int, *, is_fixed: bool) -> bool:
        places = blocks = 0
        for tier in self.tiers:
            if tier is not owner:
                below = tier.place > owner.place
                places += tier.fixed_places if below else tier.places
                blocks += tier.fixed_blocks if below else tier.blocks
        if is_fixed or taker.place < owner.place:
            places += 1
            blocks += wanted
        rest = 1 - owner.policy.reserved_share
        return places <= rest * self._places and blocks <= rest * self._total_blocks
