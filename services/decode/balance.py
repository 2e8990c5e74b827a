"""Where a prompt is computed when prefill workers have much to do. Pure."""

from __future__ import annotations

from baton.core.types import EngineStats, Tier


def is_sooner_here(stats: EngineStats, tier: Tier, uncached_tokens: int, elsewhere_seconds: float) -> bool:
    """Whether this worker's engine would have computed a prompt of ``tier`` before ``elsewhere_seconds`` have passed.

    Beside the answers that go on it computes prompts as fast as their TPOT target allows, which is what its figures
    say; one that has not computed any yet is given the chance to learn it.
    """
    rate = stats.prompt_tokens_per_second
    return not rate or (stats.backlog_before(tier) + uncached_tokens) / rate < elsewhere_seconds
