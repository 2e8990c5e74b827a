"""Where requests go: least load in tokens, ties broken evenly, the other role when one is gone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import ConfigError, InvalidRequest, Overloaded, UnknownModel
from baton.core.types import (
    CacheClass,
    CachePolicy,
    Candidate,
    EngineStats,
    KvFormat,
    ModelCard,
    Plan,
    PlanLimits,
    PlanQuery,
    ProcessRecord,
    Role,
    WorkerState,
)
from services.planner.config import PlannerConfig
from services.planner.fleet import Fleet, FleetPicture, InFlight
from services.planner.policy import plan

CARD = ModelCard("m", "llama", 8192, 512, "h", KvFormat("fake", 16, 1, 1, 8))
QUERY = PlanQuery("r", "m", "acme", prompt_tokens=200, max_tokens=50)
CONFIG = PlannerConfig()


def worker(
    worker_id: str, role: Role = Role.DECODE, *, held: int = 0, waiting: int = 0, card: ModelCard | None = CARD
) -> ProcessRecord:
    stats = EngineStats(total_blocks=1000, free_blocks=1000 - held, held_blocks=held, waiting=waiting)
    return ProcessRecord(
        worker_id, role, f"{worker_id}:1", epoch=5, pid=1, state=WorkerState.READY, card=card, stats=stats
    )


def fleet(*workers: ProcessRecord, **in_flight: int) -> Fleet:
    picture = FleetPicture()
    picture.update(workers)
    return picture.snapshot(in_flight)


def decide(found: Fleet, query: PlanQuery = QUERY, config: PlannerConfig = CONFIG) -> Plan:
    return plan(query, found, config, lambda: 0.0)


def ids(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.worker_id for candidate in candidates]


@pytest.mark.parametrize("speculation", [True, False])
def test_a_plan_says_whether_drafts_may_be_tried(speculation: bool) -> None:
    assert decide(fleet(worker("d1")), config=PlannerConfig(speculation=speculation)).speculation == speculation


def test_by_default_a_plan_limits_nothing_and_says_nothing_of_caching() -> None:
    decided = decide(fleet(worker("d1")))
    assert (decided.limits, decided.cache) == (PlanLimits(), CachePolicy())


def test_a_limit_is_set_where_it_binds_and_has_its_reason() -> None:
    config = replace(CONFIG, max_tokens=40, max_chunk_tokens=64, max_seconds=30.0)
    found = fleet(worker("d1"), worker("p1", Role.PREFILL))
    decided = decide(found, config=config)
    assert decided.limits == PlanLimits(40, 64, 30.0)
    assert decided.reasons == ("max_tokens_limit", "max_chunk_tokens_limit", "time_limit", "least_load")
    small = decide(found, replace(QUERY, prompt_tokens=64, max_tokens=40), replace(config, max_seconds=0.0))
    assert (small.limits, small.reasons) == (PlanLimits(), ("least_load",))


@pytest.mark.parametrize(
    ("priority", "cache"),
    [
        (-6, CachePolicy()),
        (-5, CachePolicy(CacheClass.NONE)),
        (-1, CachePolicy(CacheClass.NONE)),
        (0, CachePolicy(CacheClass.NORMAL, 128)),
        (7, CachePolicy(CacheClass.KEEP)),
    ],
)
def test_the_cache_class_is_that_of_the_highest_priority_reached(priority: int, cache: CachePolicy) -> None:
    config = replace(CONFIG, cache_classes=("7=keep", "-5=none", "0=normal:128"))
    assert decide(fleet(worker("d1")), replace(QUERY, priority=priority), config).cache == cache


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("max_tokens", -1, "must be at least 0"),
        ("max_chunk_tokens", -1, "must be at least 0"),
        ("max_seconds", -0.5, "must be at least 0"),
        ("max_seconds", float("inf"), "must be finite"),
        ("max_seconds", float("nan"), "must be at least 0"),
        *(
            ("cache_classes", (entry,), "must hold entries PRIORITY=CLASS .*CLASS one of none, normal, keep")
            for entry in ("0=forever", "high=keep", "keep", "0=keep:", "0=keep:-1", "0=keep:all")
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_name(key: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError, match=f"^planner.{key} .*{limit}"):
        replace(CONFIG, **{key: value})


def test_both_kinds_are_ranked_by_held_blocks() -> None:
    decided = decide(
        fleet(
            worker("d1", held=300),
            worker("d2", held=100),
            worker("d3", held=200),
            worker("p1", Role.PREFILL, held=9),
            worker("p2", Role.PREFILL, held=2),
        )
    )
    assert ids(decided.decode) == ["d2", "d3", "d1"]
    assert ids(decided.prefill) == ["p2", "p1"]
    assert decided.decode[0] == Candidate("d2", "d2:1", 5)
    assert decided.local_prefill_max_tokens == CONFIG.local_prefill_max_tokens
    assert decided.reasons == ("least_load",)


def test_full_kv_outweighs_a_low_request_count() -> None:
    decided = decide(fleet(worker("full", held=900), worker("many_small", held=100, waiting=3)))
    assert ids(decided.decode) == ["many_small", "full"]


def test_waiting_requests_count_as_load() -> None:
    assert ids(decide(fleet(worker("queue", waiting=4), worker("some", held=30))).decode) == ["some", "queue"]


def test_own_decisions_count_before_the_workers_figures_show_them() -> None:
    assert ids(decide(fleet(worker("a"), worker("b"), a=500)).decode) == ["b", "a"]


def test_candidates_are_bounded() -> None:
    many = [worker(f"d{index}") for index in range(20)]
    assert len(decide(fleet(*many)).decode) == CONFIG.max_candidates


@pytest.mark.parametrize("state", [WorkerState.LOADING, WorkerState.DRAINING, WorkerState.DEAD])
def test_only_ready_workers_are_chosen(state: WorkerState) -> None:
    decided = decide(fleet(replace(worker("a"), state=state), worker("b", held=999)))
    assert ids(decided.decode) == ["b"]


def test_workers_that_failed_the_request_are_avoided_in_both_kinds() -> None:
    found = fleet(worker("d1"), worker("d2"), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL))
    decided = decide(found, replace(QUERY, avoid=("d1", "p2")))
    assert (ids(decided.decode), ids(decided.prefill)) == (["d2"], ["p1"])


def test_without_a_prefill_worker_decode_computes_prompts() -> None:
    decided = decide(fleet(worker("d1")))
    assert (ids(decided.decode), decided.prefill) == (["d1"], ())
    assert "prefill_pool_empty" in decided.reasons


def test_without_a_decode_worker_prefill_workers_take_its_work() -> None:
    found = fleet(worker("d1"), worker("p1", Role.PREFILL, held=5), worker("p2", Role.PREFILL))
    decided = decide(found, replace(QUERY, avoid=("d1",)))
    assert (ids(decided.decode), decided.prefill) == (["p2", "p1"], ())
    assert "decode_pool_empty" in decided.reasons


def test_other_models_workers_are_not_chosen() -> None:
    other = worker("other", card=replace(CARD, model="n"))
    assert ids(decide(fleet(other, worker("d1", held=900))).decode) == ["d1"]


def test_model_that_no_worker_ever_served_is_unknown() -> None:
    with pytest.raises(UnknownModel, match="no worker has ever served 'x'"):
        decide(fleet(worker("d1")), replace(QUERY, model="x"))


def test_known_model_without_a_ready_worker_is_overload() -> None:
    picture = FleetPicture()
    picture.update([worker("d1")])
    picture.update([])
    with pytest.raises(Overloaded, match="no worker for m is ready") as refused:
        decide(picture.snapshot({}))
    assert refused.value.retry_after == CONFIG.retry_after_seconds
    with pytest.raises(Overloaded):
        decide(fleet(worker("d1")), replace(QUERY, avoid=("d1",)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("model", ""),
        ("prompt_tokens", 0),
        ("max_tokens", 0),
        ("hop", -1),
        ("attention_window", 0),
    ],
)
def test_incomplete_query_is_refused_by_the_fields_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as refused:
        decide(fleet(worker("d1")), replace(QUERY, **{field: value}))
    assert refused.value.field == field


def test_equal_workers_share_requests_evenly() -> None:
    rng = random.Random(1)
    found = fleet(*(worker(f"d{index}") for index in range(4)))
    counts = Counter(plan(QUERY, found, CONFIG, rng.random).decode[0].worker_id for _ in range(4000))
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_burst_between_two_heartbeats_is_spread() -> None:
    """Stats do not move during the burst; only the planner's own accounting tells the workers apart."""
    in_flight = InFlight(ManualClock(), seconds=1.0)
    picture = FleetPicture()
    picture.update([worker(f"d{index}") for index in range(4)])
    rng = random.Random(2)
    counts: Counter[str] = Counter()
    for _ in range(100):
        chosen = plan(QUERY, picture.snapshot(in_flight.tokens()), CONFIG, rng.random).decode[0].worker_id
        in_flight.add(chosen, 250)
        counts[chosen] += 1
    assert max(counts.values()) - min(counts.values()) <= 2


def test_decisions_in_flight_age_out() -> None:
    clock = ManualClock()
    in_flight = InFlight(clock, seconds=1.0)
    in_flight.add("a", 10)
    clock.advance(0.5)
    in_flight.add("a", 5)
    in_flight.add("b", 3)
    assert dict(in_flight.tokens()) == {"a": 15, "b": 3}
    clock.advance(0.5)
    assert dict(in_flight.tokens()) == {"a": 5, "b": 3}
    clock.advance(0.5)
    assert dict(in_flight.tokens()) == {}


WINDOWED = replace(CARD, modules=("attention_window",))
WINDOW = replace(CONFIG, attention_window=128)


def test_a_prompt_longer_than_the_window_goes_to_workers_with_the_module() -> None:
    found = fleet(
        worker("d1"),
        worker("d2", held=300, card=WINDOWED),
        worker("p1", Role.PREFILL),
        worker("p2", Role.PREFILL, held=300, card=WINDOWED),
    )
    decided = decide(found, config=WINDOW)
    assert (ids(decided.decode), ids(decided.prefill), decided.attention_window) == (["d2"], ["p2"], 128)
    assert "attention_window" in decided.reasons
    short = decide(found, replace(QUERY, prompt_tokens=128), WINDOW)
    assert (ids(short.decode), short.attention_window) == (["d1", "d2"], None)
    assert decide(found).attention_window is None


def test_without_a_worker_that_has_the_module_a_first_hop_has_no_window_and_a_later_one_no_plan() -> None:
    found = fleet(worker("d1"), worker("p1", Role.PREFILL))
    decided = decide(found, config=WINDOW)
    assert (ids(decided.decode), decided.attention_window) == (["d1"], None)
    assert "no_attention_window" in decided.reasons
    with pytest.raises(Overloaded, match="has the module attention_window"):
        decide(found, replace(QUERY, hop=1, attention_window=128), WINDOW)


def test_a_later_hop_keeps_what_the_first_one_had_whatever_the_settings_say_now() -> None:
    found = fleet(worker("d1", card=WINDOWED))
    assert decide(found, replace(QUERY, hop=1, attention_window=77), CONFIG).attention_window == 77
    assert decide(found, replace(QUERY, hop=1), WINDOW).attention_window is None
