"""Process records as the registry stores them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from baton.core.types import EngineStats, ProcessRecord, Role, Tier, TierLoad, TierStats
from baton.state.records import decode_record, encode_record

STATS = EngineStats(waiting=3, backlog_tokens=7, tiers=(TierLoad(Tier.GOLD),))
RECORD = ProcessRecord("d", Role.DECODE, "d:1", 5, 1, stats=STATS, tier=TierStats(9))


def stored(part: str, **changes: Any) -> bytes:
    fields = json.loads(encode_record(RECORD))
    fields[part] |= changes
    return json.dumps(fields).encode()


def test_a_record_comes_back_as_it_was() -> None:
    assert decode_record(encode_record(RECORD)) == RECORD


def test_what_an_older_worker_does_not_say_is_not_known_and_what_a_newer_one_says_is_ignored() -> None:
    fields = json.loads(stored("stats", speed="fast"))
    del fields["stats"]["backlog_tokens"]
    assert decode_record(json.dumps(fields).encode()).stats == replace(STATS, backlog_tokens=0)


@pytest.mark.parametrize("part", ["stats", "tier"])
@pytest.mark.parametrize("value", [None, "3", [1]])
def test_a_record_whose_figures_are_none_is_none(part: str, value: object) -> None:
    name = {"stats": "decode_step_seconds", "tier": "hits"}[part]
    with pytest.raises(ValueError, match=f"not a process record: {name}: must be a number"):
        decode_record(stored(part, **{name: value}))
