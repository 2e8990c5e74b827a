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

    A tier's credit is its reserved share of the tokens of past steps, less what it used in those that had not enough.
    """

    def __init__(self, shares: FairShares, step_tokens: int) -> None:
        self._shares = shares
        self._step_tokens = step_tokens
        self._seen_steps = 0
        for tier in shares.tiers:
            tier.credit = self._most_credit(tier.policy.reserved_share)

    def sort(self, unfinished: list[Sequence], steps: int, now: float) -> list[Sequence]:
        """``steps``: planned so far. Counters of those who run must be settled."""
        passed, self._seen_steps = steps - self._seen_steps, steps
        for tier in self._shares.tiers:
            reserved = tier.policy.reserved_share
            tier.credit = min(tier.credit + passed * reserved * self._step_tokens, self._most_credit(reserved))
        return sorted(unfinished, key=lambda sequence: self._key(sequence, now))

    def used(self, sequence: Sequence, tokens: int, now: float) -> None:
        """So many tokens of a sorted step went to the sequence."""
        sequence.share.served_at = now
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

    def _most_credit(self, reserved: float) -> float:
        return BURST_STEPS * reserved * self._step_tokens


def tenants(sequences: Iterable[Sequence]) -> int:
    """How many different ones."""
    return len({id(sequence.share) for sequence in sequences})
