from __future__ import annotations

import gzip
from itertools import islice, pairwise
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from bench.arrivals import Arrival, poisson, read_trace, scaled
from bench.prompts import ArrivalPrompts, RandomPrompts
from bench.shapes import Range

DATA = Path(__file__).parents[3] / "bench" / "data"


def test_poisson_arrivals_come_at_the_rate_and_follow_the_seed() -> None:
    arrivals = list(islice(poisson(8.0, 20, 4, seed=3), 4000))
    assert arrivals[-1].at == pytest.approx(4000 / 8.0, rel=0.05)
    assert {(a.prompt, a.output) for a in arrivals} == {(20, 4)}
    assert arrivals[:50] == list(islice(poisson(8.0, 20, 4, seed=3), 50))
    assert arrivals[:50] != list(islice(poisson(8.0, 20, 4, seed=4), 50))


def test_poisson_gaps_scatter_as_much_as_their_mean() -> None:
    times = [a.at for a in islice(poisson(1.0, 1, 1, seed=1), 4000)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    ("name", "requests", "seconds"),
    [("conversation_trace.jsonl.gz", 12031, 3537), ("AzureLLMInferenceTrace_conv.csv.gz", 19366, 3502)],
)
def test_the_traces_beside_the_benchmark_can_be_read(name: str, requests: int, seconds: float) -> None:
    arrivals = read_trace(DATA / name)
    assert (len(arrivals), arrivals[0].at) == (requests, 0.0)
    assert arrivals[-1].at == pytest.approx(seconds, abs=1)


def test_a_scaled_trace_keeps_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = (
        '{"timestamp": 1000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 9]}\n'
    )
    path.write_bytes(gzip.compress(lines.encode()))
    first, second = scaled(read_trace(path), lengths=1 / 16, speed=4)
    assert (first.at, second.at) == (0.0, 0.5)
    assert (first.prompt, second.prompt, first.output, second.output) == (94, 69, 1, 1)
    prompts = ArrivalPrompts(1000, seed=1)
    ids, others = prompts.ids(0, first), prompts.ids(1, second)
    assert (len(ids), len(others)) == (94, 69)
    assert ids[:64] == others[:64]
    assert ids[64:] != others[64:]


def test_prompts_without_blocks_share_nothing_and_do_not_depend_on_the_order() -> None:
    prompts, arrival = ArrivalPrompts(1000, seed=1), Arrival(0.0, 32, 1)
    drawn = {number: prompts.ids(number, arrival) for number in (3, 1, 2)}
    assert {n: ArrivalPrompts(1000, seed=1).ids(n, arrival) for n in (1, 2, 3)} == drawn
    assert len({ids[:8] for ids in drawn.values()}) == 3


def test_random_prompts_stay_in_the_vocabulary_and_lengths_in_their_range() -> None:
    prompts = RandomPrompts(7, seed=1)
    assert set(prompts.ids(500)) == set(range(7))
    assert {prompts.length(Range(2, 4)) for _ in range(100)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "cannot be read: No such file"),
        ("trace.txt", b"", r"must be a \.jsonl or \.csv file"),
        ("empty.jsonl", b"", "has no requests"),
        ("bad.jsonl", b'{"timestamp": 1, "input_length": 1, "output_length": 1}\n{}\n', "line 2: KeyError"),
        ("zero.jsonl", b'{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "at least 1, got 0 in"),
        ("bad.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "line 2: ValueError"),
        ("bad.jsonl.gz", b"no archive", "cannot be read: Not a gzipped file"),
    ],
)
def test_a_damaged_trace_is_named_with_its_line(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as raised:
        read_trace(tmp_path / name)
    assert name in raised.value.message


def test_what_is_drawn_for_a_shape_depends_on_no_other_shape() -> None:
    alone, after = RandomPrompts(1000, seed=1), RandomPrompts(1000, seed=1)
    after.begin("other")
    after.ids(50)
    for prompts in (alone, after):
        prompts.begin("batch")
    first = alone.ids(20)
    assert first == after.ids(20)
    alone.begin("batch")
    assert alone.ids(20) != first, "a second repeat has prompts of its own"
