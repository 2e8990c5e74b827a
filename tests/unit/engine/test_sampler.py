from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.types import Sampling
from baton.engine.philox import philox, uniform
from baton.engine.runner import Draw
from baton.engine.sampler import Row, sample

VOCAB = 64


def logits_for(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw_one(logits: torch.Tensor, sampling: Sampling, context: list[int] | None = None, **draw: object) -> int:
    query = Draw(sampling, prompt_length=draw.pop("prompt_length", 0), **draw)  # type: ignore[arg-type]
    (result,) = sample(logits.reshape(1, -1), [Row(query, context or [])])
    assert result.token_id is not None
    return result.token_id


def frequencies(logits: torch.Tensor, sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    counts = torch.zeros(VOCAB)
    for position in range(draws):
        counts[draw_one(logits, sampling, context=[0] * position if position < 1 else _Length(position))] += 1
    return counts / draws


class _Length(list[int]):
    """A context of a given length without its tokens: drawing looks at nothing else without penalties."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length


def test_philox_matches_the_published_vectors() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones, ones, ones, ones), (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi_counter, pi_key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(pi_counter, pi_key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_spread_evenly_over_positions_and_seeds() -> None:
    for values in ([uniform(7, p) for p in range(4000)], [uniform(s, 7) for s in range(4000)]):
        assert min(values) >= 0 and max(values) < 1
        assert abs(sum(values) / len(values) - 0.5) < 0.02
        assert abs(sum(v * v for v in values) / len(values) - 1 / 3) < 0.02


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = logits_for(1)[0]
    assert draw_one(logits, Sampling(temperature=0, seed=5)) == int(logits.argmax())


def test_draws_follow_the_distribution() -> None:
    logits = logits_for(2)[0] / 2
    expected = torch.softmax(logits / 0.8, dim=0)
    assert (frequencies(logits, Sampling(temperature=0.8, seed=3)) - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1, top_k=3), 3),
        (Sampling(temperature=1, top_k=1), 1),
        (Sampling(temperature=1, top_p=1e-9), 1),
        (Sampling(temperature=1, min_p=1.0), 1),
    ],
)
def test_filters_keep_only_the_likeliest(sampling: Sampling, kept: int) -> None:
    logits = logits_for(3)[0]
    allowed = set(torch.topk(logits, kept).indices.tolist())
    drawn = {draw_one(logits, sampling, context=_Length(position)) for position in range(200)}
    assert drawn <= allowed and (kept == 1 or len(drawn) > 1)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05] + [0.0] * (VOCAB - 4))
    logits = probabilities.log()
    for top_p, allowed in ((0.5, {0}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (0.999, {0, 1, 2, 3})):
        drawn = {draw_one(logits, Sampling(temperature=1, top_p=top_p), context=_Length(p)) for p in range(300)}
        assert drawn == allowed


def test_min_p_drops_what_is_unlikely_beside_the_best() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1] + [0.0] * (VOCAB - 3)).log()
    drawn = {draw_one(logits, Sampling(temperature=1, min_p=0.4), context=_Length(p)) for p in range(200)}
    assert drawn == {0, 1}


def test_repetition_penalty_covers_prompt_and_output_others_output_only() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[3], logits[4], logits[5] = 2.0, 1.9, 1.8
    assert draw_one(logits, Sampling(repetition_penalty=1.2), context=[3], prompt_length=1) == 4
    assert draw_one(logits, Sampling(presence_penalty=0.5), context=[3], prompt_length=1) == 3
    assert draw_one(logits, Sampling(presence_penalty=0.5), context=[3], prompt_length=0) == 4
    assert draw_one(logits, Sampling(frequency_penalty=0.06), context=[3, 4, 3, 4, 4], prompt_length=0) == 3
    assert draw_one(logits, Sampling(frequency_penalty=0.15), context=[3, 3, 4], prompt_length=0) == 5
    negative = torch.full((VOCAB,), -5.0)
    negative[3], negative[4] = -1.0, -1.1
    assert draw_one(negative, Sampling(repetition_penalty=1.5), context=[3], prompt_length=1) == 4


def test_bias_and_forbidden_ids_hold_for_greedy_and_sampled() -> None:
    logits = logits_for(4)[0]
    best = int(logits.argmax())
    for temperature in (0.0, 1.0):
        assert draw_one(logits, Sampling(temperature=temperature, logit_bias=((7, 100.0),))) == 7
        assert draw_one(logits, Sampling(temperature=temperature, top_k=1), forbidden=(best,)) != best


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_for(5)
    sampling = Sampling(temperature=0.3, logit_bias=((7, 100.0),))
    (result,) = sample(logits, [Row(Draw(sampling, 0, logprobs=4), [])])
    expected = torch.log_softmax(logits[0].double(), dim=0)
    assert result.logprob is not None and result.logprob.token_id == 7
    assert math.isclose(result.logprob.logprob, float(expected[7]), abs_tol=1e-5)
    assert [pair[0] for pair in result.logprob.top] == torch.topk(expected, 4).indices.tolist()


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = logits_for(6, rows=3)
    logits[1, 9] = math.nan
    results = sample(logits, [Row(Draw(Sampling(), 0), [])] * 3)
    assert results[1].error is not None and "not finite" in results[1].error.message
    assert results[0].token_id == int(logits[0].argmax()) and results[2].error is None


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_k=st.sampled_from([0, 1, 5, VOCAB * 2]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    seed=st.integers(0, 2**63 - 1),
)
CONTEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SAMPLINGS, CONTEXTS, st.integers(0, 1000)), min_size=1, max_size=8))
def test_a_batch_draws_what_each_row_draws_alone(rows: list[tuple[Sampling, list[int], int]]) -> None:
    logits = torch.cat([logits_for(seed) for _, _, seed in rows])
    queries = [Row(Draw(sampling, len(context) // 2, logprobs=2), context) for sampling, context, _ in rows]
    together = sample(logits, queries)
    alone = [sample(logits[i : i + 1], [query])[0] for i, query in enumerate(queries)]
    assert together == alone
