"""Whatever tenants send: nobody starves, no step is left empty that could be filled, and nothing is lost of the pool.

(That no token depends on who competes is in ``test_engine_core.py`` and ``test_run_ahead.py``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.types import Tier, TokenRequest
from baton.engine.runner import Part
from tests.unit.engine.core_driver import Driver, prompt, request
from tests.unit.engine.core_modes import steps_ahead

__all__ = ["steps_ahead"]  # a fixture of every test here

STEP_SECONDS = 0.02
BOUND_SECONDS = 0.5
MOST_OUTPUT = 6
STRICT = (f"gold=1000:0.8:{BOUND_SECONDS}", f"silver=1:0:{BOUND_SECONDS}", f"bronze=0.001:0:{BOUND_SECONDS}")


@dataclass
class Tenant:
    """Sends a request of its own shape every ``every`` steps, ever more urgent ones if ``rising``."""

    name: str
    tier: Tier
    every: int
    prompt: int
    output: int
    is_rising: bool
    prefills: bool = False  # it asks for first tokens only
    sent: list[int] = field(default_factory=list)

    def request(self, step: int) -> TokenRequest:
        tokens = prompt(self.prompt, step)
        return request(tokens, self.output, tenant=self.name, tier=self.tier, priority=step if self.is_rising else 0)


@st.composite
def crowds(draw: st.DrawFn) -> list[Tenant]:
    return [
        Tenant(
            f"t{index}",
            draw(st.sampled_from(Tier)),
            every=draw(st.sampled_from([1, 2, 7])),
            prompt=draw(st.integers(1, 20)),
            output=draw(st.integers(1, MOST_OUTPUT)),
            is_rising=draw(st.booleans()),
        )
        for index in range(draw(st.integers(2, 5)))
    ]


def flood(driver: Driver, crowd: Sequence[Tenant], steps: int) -> None:
    for step in range(steps):
        for tenant in crowd:
            if step % tenant.every == 0:
                wanted = tenant.request(step)
                opens = driver.prefill if tenant.prefills else driver.reserve
                tenant.sent.append(opens(wanted, len(wanted.prompt)))
        driver.step()
        for tenant in crowd if step % 3 == 0 else ():
            for key in [key for key in tenant.sent if driver.outcomes[key].first is not None]:
                driver.release(key)
        driver.clock.advance(STEP_SECONDS)


@settings(max_examples=15, deadline=None)
@given(crowds(), st.integers(1, 3))
def test_no_tenant_that_waits_goes_without_a_token_for_longer_than_its_bound(crowd: list[Tenant], places: int) -> None:
    """Once due, it has to wait for a place, and for others that are due, too. The highest tier would take everything:
    it outweighs the others a million times and never stops."""
    crowd = [*crowd, Tenant("flood", Tier.GOLD, 1, 8, MOST_OUTPUT, is_rising=False)]
    longest_life = 20 // 8 + 2 * MOST_OUTPUT + 4  # steps, with chunks of 8 tokens and a computation again
    bound = BOUND_SECONDS + (len(crowd) + 1) * longest_life * STEP_SECONDS
    driver = Driver(64, max_running=places, max_step_tokens=8, max_waiting=64, tiers=STRICT)
    since: dict[str, float] = {}
    drawn: dict[str, int] = {}
    for _ in range(300):
        flood(driver, crowd, 1)
        now = driver.clock.now()
        for tenant in crowd:
            tokens = sum(len(driver.outcomes[key].tokens) for key in tenant.sent)
            waits = any(not driver.outcomes[key].is_over for key in tenant.sent)
            if tokens > drawn.get(tenant.name, 0) or not waits:
                since[tenant.name] = now
            drawn[tenant.name] = tokens
            assert now - since.setdefault(tenant.name, now) <= bound, tenant


def test_a_place_that_is_given_and_taken_away_again_is_no_end_of_waiting() -> None:
    """Gold takes all prompt tokens and, before the low request has computed anything, its place as well."""
    driver = Driver(64, max_running=2, max_step_tokens=8, max_waiting=64, tiers=STRICT)
    low = driver.reserve(request(prompt(2, 1), 1, tenant="low"), 2)
    gold = Tenant("flood", Tier.GOLD, 1, 8, MOST_OUTPUT, is_rising=False)
    while driver.clock.now() < BOUND_SECONDS:
        flood(driver, [gold], 1)
    assert driver.stats.preemptions > 1 and not driver.outcomes[low].tokens
    for _ in range(10 * MOST_OUTPUT):
        flood(driver, [gold], 1)
        if driver.outcomes[low].is_over:
            break
    assert driver.clock.now() <= BOUND_SECONDS + 2 * MOST_OUTPUT * STEP_SECONDS


@settings(max_examples=20, deadline=None)
@given(crowds(), st.integers(2, 8), st.integers(4, 24))
def test_no_step_has_room_for_tokens_that_somebody_admitted_could_use(
    crowd: list[Tenant], places: int, step_tokens: int
) -> None:
    checked = 0

    def check(parts: Sequence[Part]) -> None:
        nonlocal checked
        ended = {part.key for part in parts if part.draw is not None}
        waiting = [s for s in driver.core._scheduler._running if s.key not in ended and s.launched < s.length]
        if waiting:
            checked += 1
            assert sum(part.end - part.start for part in parts) == driver_tokens

    driver = Driver(512, max_running=places, max_step_tokens=step_tokens, max_waiting=64, on_step=check)
    driver_tokens = max(step_tokens, 1)
    crowd = [*crowd, Tenant("long", Tier.GOLD, 5, 60, 2, is_rising=False)]
    flood(driver, crowd, 60)
    assert checked


@settings(max_examples=20, deadline=None)
@given(crowds(), st.integers(2, 8))
def test_nobody_waits_beside_a_free_place_when_only_one_tier_is_there(crowd: list[Tenant], places: int) -> None:
    driver = Driver(512, max_running=places, max_waiting=64)
    for tenant in crowd:
        tenant.tier = Tier.SILVER
    for _ in range(60):
        flood(driver, crowd, 1)
        driver.core.admit()
        assert not driver.stats.waiting or driver.stats.running == places
    for key in list(driver.core._live):
        driver.release(key)
    driver.assert_idle()


@settings(max_examples=25, deadline=None)
@given(crowds(), st.integers(8, 20), st.integers(1, 6), st.sampled_from([1.0, 0.4]), st.integers(0, 3))
def test_what_tenants_are_said_to_hold_is_what_is_held(
    crowd: list[Tenant], blocks: int, places: int, tenant_share: float, prefilling: int
) -> None:
    for tenant in crowd[:prefilling]:
        tenant.prefills = True
    driver = Driver(blocks, max_running=places, growth_window=0, max_waiting=16, tenant_block_share=tenant_share)
    for _ in range(50):
        flood(driver, crowd, 1)
        live = [sequence for sequence in driver.core._live.values() if sequence.blocks]
        tiers = driver.core._scheduler._shares.tiers
        for tier in tiers:
            own = [sequence for sequence in live if sequence.request.tier is tier.tier]
            assert tier.places == len(own)
            fixed = [sequence for sequence in own if not sequence.is_preemptible]
            assert (tier.fixed_places, tier.fixed_blocks) == (len(fixed), sum(len(each.blocks) for each in fixed))
            assert tier.promised == sum(sequence.promised for sequence in own)
            for share in tier.tenants.values():
                mine = [sequence for sequence in own if sequence.request.tenant == share.tenant]
                assert set(share.blocks) == {block for sequence in mine for block in sequence.blocks}
            assert tier.blocks == sum(len(share.blocks) for share in tier.tenants.values())
    for key in list(driver.core._live):
        driver.release(key)
    driver.assert_idle()
