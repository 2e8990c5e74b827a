"""Whose prompt is computed first when a step has not enough tokens for all. Pure; told the time, it never asks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.engine.sequence import Sequence
from baton.engine.shares import FairShares

BURST_STEPS = 128  # whose reserved tokens a tier may have saved up


class PromptOrder:
    """First who has waited past its tier's bound without any of its tenant's prompts being computed; then tiers with
    credit, from the highest down; then tiers and tenants that were charged least. Inside a tenant it goes by priority,
    then arrival.

    A tier's credit is its reserved share of the tokens that steps had room for, less what it got for it in those that
    had not enough: at most what it would have of 128 steps like the one that is planned.
    """

    def __init__(self, shares: FairShares, step_tokens: int) -> None:
        self._shares = shares
        self._passed = 0  # tokens that steps had room for since the last one that was sorted
        for tier in shares.tiers:
            tier.credit = BURST_STEPS * tier.policy.reserved_share * step_tokens

    def passed(self, tokens: int) -> None:
        """A step with room for so many tokens of prompts is planned, sorted or not."""
        self._passed += tokens

    def sort(self, unfinished: list[Sequence], tokens: int, now: float) -> list[Sequence]:
        """Of a step with room for so many ``tokens``. Counters of those who run must be settled."""
        for tier in self._shares.tiers:
            reserved = tier.policy.reserved_share
            tier.credit = min(tier.credit + reserved * self._passed, BURST_STEPS * reserved * tokens)
        self._passed = 0
        return sorted(unfinished, key=lambda sequence: self._key(sequence, now))

    def used(self, sequence: Sequence, tokens: int, now: float) -> None:
        """So many tokens of a sorted step went to the sequence. What a tier gets without credit, it does not owe."""
        sequence.share.served_at = now
        if sequence.share.tier.credit > 0:
            sequence.share.tier.credit -= tokens

    def _key(self, sequence: Sequence, now: float) -> tuple[float, float, float, float, tuple[int, int, int]]:
        share, tier = sequence.share, sequence.share.tier
        due_at = max(sequence.submitted_at, share.served_at) + tier.policy.bound_seconds
        has_credit = tier.credit > 0
        return (
            due_at if due_at <= now else math.inf,
            0 if has_credit else 1,
            tier.place if has_credit else tier.counter,
            share.counter,
            sequence.rank,
        )


def tenants(sequences: Iterable[Sequence]) -> int:
    """How many different ones."""
    return len({id(sequence.share) for sequence in sequences})
