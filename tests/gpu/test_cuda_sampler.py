"""The device sampler against the CPU sampler: the same tokens from the same logits, whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.types import Sampling
from baton.engine.cuda.build import build
from baton.engine.cuda.kernels import Overlap
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.sampler import MAX_EDITS, NOT_FINITE, SOUND, TOO_MANY_EDITS
from baton.engine.runner import Draw
from baton.engine.sampler import Row
from tests.gpu.sampler_trial import (
    BF16,
    DEVICE,
    F32,
    UNTOUCHED,
    Trial,
    expected,
    normal,
    queries_of,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABS = [256, 257, 32_000, 49_152, 128_256, 151_936]
BORDER_SHARE = 1e-3  # of draws that may fall within rounding of the border between two tokens


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


# --- the likeliest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_rows_draw_the_lowest_of_the_likeliest(library: CudaLibrary, vocab: int, dtype: torch.dtype) -> None:
    trial = Trial(library, vocab, 256)
    for rows in (1, 3, 40, 256):
        logits = normal(rows, vocab, seed=rows).to(dtype)
        tied = torch.randint(vocab, (rows, 2), generator=torch.Generator().manual_seed(rows))
        logits[torch.arange(rows)[:, None], tied] = 20.0
        tokens, flags = trial.draw(logits, queries_of([Sampling()] * rows))
        assert tokens == tied.min(dim=1).values.tolist()
        assert set(flags) == {SOUND}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1, top_p=0.9), Sampling(temperature=1, top_k=9)])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_lone_possible_token_is_drawn(library: CudaLibrary, vocab: int, sampling: Sampling) -> None:
    only = [0, 1, vocab // 2, vocab - 2, vocab - 1]
    logits = torch.full((len(only), vocab), -torch.inf)
    logits[torch.arange(len(only)), torch.tensor(only)] = -3.0
    tokens, flags = Trial(library, vocab, 8).draw(logits.to(BF16), queries_of([sampling] * len(only)))
    assert tokens == only
    assert set(flags) == {SOUND}


# --- the same draws as the CPU ----------------------------------------------------------------------------------------


def random_sampling(rng: random.Random, vocab: int) -> Sampling:
    options: dict[str, list[Any]] = {
        "top_k": [1, 2, 40, 1000, 3000, vocab, 10 * vocab],
        "top_p": [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999],
        "min_p": [0.001, 0.05, 0.5, 1.0],
        "repetition_penalty": [0.8, 1.1, 1.5],
        "presence_penalty": [-0.5, 0.7],
        "frequency_penalty": [-0.2, 0.3],
    }
    chosen = {name: rng.choice(values) for name, values in options.items() if rng.random() < 0.35}
    biases = [(rng.randrange(vocab), rng.choice([-100.0, -1.5, 2.0, 5.0])) for _ in range(rng.choice([0, 0, 1, 50]))]
    temperature = rng.choice([0, 0.01, 0.3, 1.0, 1.0, 1.7, 50.0])
    seed = rng.randrange(-(2**63), 2**63)
    return Sampling(temperature=temperature, seed=seed, logit_bias=tuple(biases), **chosen)


def random_row(rng: random.Random, vocab: int) -> torch.Tensor:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    kind = rng.choice(["plain", "peaked", "flat", "one", "equal", "coarse", "crowded", "masked", "nan", "inf", "none"])
    match kind:
        case "peaked":
            row *= 4
        case "flat":
            row *= 0.01
        case "one":
            row = torch.full((vocab,), -torch.inf)
            row[rng.randrange(vocab)] = -3.0
        case "equal":
            row.fill_(1.5)
        case "coarse":
            row = (row * 2).round()
        case "crowded":  # far more in one bucket of the sampler's search than it can list
            row *= 1e-9
            row[3] = 10.0
        case "masked":
            row[::2] = -torch.inf
        case "nan":
            row[rng.randrange(vocab)] = torch.nan
        case "inf":
            row[rng.randrange(vocab)] = torch.inf
        case "none":
            row.fill_(-torch.inf)
        case _:
            pass
    return row


def random_query(rng: random.Random, vocab: int) -> Row:
    length = rng.choice([1, 5, 300])
    context = [rng.randrange(rng.choice([7, vocab])) for _ in range(length)]
    forbidden = tuple(rng.randrange(vocab) for _ in range(rng.choice([0, 0, 2])))
    return Row(Draw(random_sampling(rng, vocab), rng.randint(1, length), forbidden), context)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("vocab", "rounds"), [(256, 40), (257, 20), (32_000, 6), (128_256, 2), (151_936, 1)])
def test_mixed_batches_draw_what_the_cpu_draws(
    library: CudaLibrary, vocab: int, rounds: int, dtype: torch.dtype
) -> None:
    rng = random.Random(vocab)
    trial = Trial(library, vocab, 64)
    for _ in range(rounds):
        count = rng.choice([1, 7, 40, 64])
        logits = torch.stack([random_row(rng, vocab) for _ in range(count)]).to(dtype)
        queries = [random_query(rng, vocab) for _ in range(count)]
        tokens, flags = trial.draw(logits, queries)
        want = expected(logits, queries)
        assert flags == [NOT_FINITE if token is None else SOUND for token in want]
        wrong = [row for row in range(count) if want[row] is not None and tokens[row] != want[row]]
        assert not wrong, [(queries[row], tokens[row], want[row]) for row in wrong[:3]]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=1.3, top_k=50, top_p=0.95),
        Sampling(temperature=1.0, min_p=0.05),
    ],
)
def test_draws_differ_from_the_cpu_only_at_the_border_between_two_tokens(
    library: CudaLibrary, sampling: Sampling
) -> None:
    vocab, count, rounds = 32_000, 256, 8
    trial = Trial(library, vocab, count)
    wrong = 0
    for seed in range(rounds):
        logits = normal(count, vocab, seed=seed, scale=1.0).to(BF16)
        queries = queries_of([replace(sampling, seed=seed * count + row) for row in range(count)])
        tokens, _ = trial.draw(logits, queries)
        wrong += sum(map(int.__ne__, tokens, (token or 0 for token in expected(logits, queries))))
    assert wrong <= BORDER_SHARE * count * rounds


def test_draws_follow_the_distribution(library: CudaLibrary) -> None:
    vocab, rows, draws = 64, 256, 40
    logits = normal(1, vocab, seed=2, scale=1.5).to(BF16)
    trial = Trial(library, vocab, rows)
    counts = torch.zeros(vocab)
    for batch in range(draws):
        samplings = [Sampling(temperature=0.8, seed=batch * rows + row) for row in range(rows)]
        tokens, _ = trial.draw(logits.expand(rows, vocab).contiguous(), queries_of(samplings))
        counts += torch.bincount(torch.tensor(tokens), minlength=vocab)
    share = torch.softmax(logits[0].float() / 0.8, dim=0)
    error = (counts / counts.sum() - share) / (share * (1 - share) / counts.sum()).sqrt()  # in standard deviations
    assert error.abs().max() < 5


# --- independence of the batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_a_row_draws_the_same_alone_and_in_any_batch(library: CudaLibrary, vocab: int) -> None:
    rng = random.Random(3)
    logits = normal(256, vocab, scale=1.0).to(BF16)
    queries = [random_query(rng, vocab) for _ in range(256)]
    trial = Trial(library, vocab, 256)
    whole, _ = trial.draw(logits, queries)
    for rows in ([0], [1], [9], range(20), range(20, 60), range(60, 160)):
        part, _ = trial.draw(logits[list(rows)], [queries[row] for row in rows])
        assert part == [whole[row] for row in rows]


def test_rows_that_are_not_finite_are_flagged_and_the_others_are_not_harmed(library: CudaLibrary) -> None:
    vocab = 32_000
    logits = normal(6, vocab).to(BF16)
    queries = queries_of([Sampling(temperature=1, top_p=0.9, seed=row) for row in range(6)])
    trial = Trial(library, vocab, 6)
    sound, _ = trial.draw(logits, queries)
    logits[1, 5] = torch.nan
    logits[2, vocab - 1] = torch.inf
    logits[4] = -torch.inf
    tokens, flags = trial.draw(logits, queries)
    assert flags == [SOUND, NOT_FINITE, NOT_FINITE, SOUND, NOT_FINITE, SOUND]
    assert [tokens[row] for row in (0, 3, 5)] == [sound[row] for row in (0, 3, 5)]
    assert [tokens[row] for row in (1, 2, 4)] == [0, 0, 0]


def test_rows_that_draw_nothing_leave_the_outputs_alone(library: CudaLibrary) -> None:
    trial = Trial(library, 256, 4)
    for row, draw in enumerate([Draw(Sampling(), 1), None, Draw(Sampling(), 1)]):
        trial.sampler.set_row(row, row, draw, [1])
    trial.sampler.upload()
    tokens, flags = trial.outputs()
    trial.sampler.sample(normal(4, 256).to(DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE), 4, tokens, flags)
    assert [token == UNTOUCHED for token in tokens.tolist()] == [False, True, False, True]
    assert flags.tolist() == [SOUND, UNTOUCHED, SOUND, UNTOUCHED]


def test_too_many_edits_refuse_that_row_alone(library: CudaLibrary) -> None:
    vocab = 32_000
    crowd = tuple((token, -1.0) for token in range(MAX_EDITS + 1))
    queries = queries_of([Sampling(logit_bias=crowd[1:]), Sampling(logit_bias=crowd), Sampling()])
    logits = normal(3, vocab).to(BF16)
    tokens, flags = Trial(library, vocab, 3).draw(logits, queries)
    assert flags == [SOUND, TOO_MANY_EDITS, SOUND]
    want = expected(logits, queries)
    assert [tokens[0], tokens[2]] == [want[0], want[2]]


# --- penalties over a decode, one step ahead of the host --------------------------------------------------------------


PENALIZED = [
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.8, frequency_penalty=0.4, presence_penalty=0.2, seed=4),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=5),
    Sampling(temperature=1.0, seed=6),
]


def steps_of(vocab: int, steps: int, rows: int) -> Iterator[torch.Tensor]:
    """Logits of which a few tokens are always likely, so that they repeat."""
    for step in range(steps):
        logits = normal(rows, vocab, seed=step, scale=1.0)
        logits[:, :10] += 6
        yield logits.to(BF16)


def decode_on_the_cpu(vocab: int, steps: int, queries: Sequence[Row]) -> list[list[int]]:
    contexts = [list(query.context) for query in queries]
    for logits in steps_of(vocab, steps, len(queries)):
        rows = [Row(query.draw, context) for query, context in zip(queries, contexts, strict=True)]
        for context, token in zip(contexts, expected(logits, rows), strict=True):
            assert token is not None
            context.append(token)
    return contexts


def test_penalties_count_tokens_that_the_host_has_not_seen(library: CudaLibrary) -> None:
    vocab, steps = 32_000, 24
    queries = [Row(Draw(sampling, prompt_length=3), [1, 2, 3, 5]) for sampling in PENALIZED]
    rows = len(queries)
    trial = Trial(library, vocab, rows)
    for row, query in enumerate(queries):
        trial.sampler.set_row(row, row, query.draw, query.context)
    positions = torch.full((rows,), 3, dtype=torch.int32, device=DEVICE)
    drawn: list[torch.Tensor] = []
    for logits in steps_of(vocab, steps, rows):
        trial.sampler.upload()
        tokens, flags = trial.outputs()
        trial.sampler.sample(logits.to(DEVICE), positions, rows, tokens, flags)
        positions += 1
        drawn.append(tokens)
    ids = torch.stack(drawn, dim=1).tolist()
    assert [[1, 2, 3, 5, *row] for row in ids] == decode_on_the_cpu(vocab, steps, queries)


def test_a_token_in_flight_is_counted_once_when_rows_move_and_rules_change(library: CudaLibrary) -> None:
    """Rows rotate every third step and are set with contexts that lack the last token, as one step ahead."""
    vocab, steps = 32_000, 24
    queries = [Row(Draw(sampling, prompt_length=3), [1, 2, 3, 5]) for sampling in PENALIZED]
    rows = len(queries)
    trial = Trial(library, vocab, rows)
    contexts = [list(query.context) for query in queries]
    place = list(range(rows))  # by key: its row
    in_flight: list[int] | None = None
    for step, logits in enumerate(steps_of(vocab, steps, rows)):
        if step % 3 == 0:
            place = [(row + step // 3) % rows for row in range(rows)]
            for key in range(rows):
                trial.sampler.set_row(place[key], key, replace(queries[key].draw), contexts[key])
        trial.sampler.upload()
        tokens, flags = trial.outputs()
        order = [place.index(row) for row in range(rows)]
        trial.sampler.sample(
            logits[order].to(DEVICE),
            torch.full((rows,), 3 + step, dtype=torch.int32, device=DEVICE),
            rows,
            tokens,
            flags,
        )
        for key, token in enumerate(in_flight or []):
            contexts[key].append(token)
        in_flight = [tokens.tolist()[place[key]] for key in range(rows)]
    for key, token in enumerate(in_flight or []):
        contexts[key].append(token)
    assert contexts == decode_on_the_cpu(vocab, steps, queries)


def test_a_sequence_that_comes_back_is_counted_from_its_context(library: CudaLibrary) -> None:
    vocab = 32_000
    trial = Trial(library, vocab, 1)
    query = Row(Draw(PENALIZED[2], prompt_length=1), [3, 3, 4])
    logits = next(steps_of(vocab, 1, 1))
    for other in range(5):  # each draws, is counted, and leaves its slot to the next
        trial.draw(logits, [Row(Draw(PENALIZED[1], 1), [other] * 9)], first_key=100 + other)
    tokens, _ = trial.draw(logits, [query], first_key=1)
    assert tokens == expected(logits, [query])


# --- graphs and steady state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", list(Overlap))
def test_a_captured_launch_draws_what_a_plain_one_does(library: CudaLibrary, overlap: Overlap) -> None:
    """Behind the kernel that computes the logits, whether or not it may start while that one drains."""
    vocab, rows = 32_000, 8
    rng = random.Random(8)
    trial = Trial(library, vocab, rows)
    computed = torch.zeros(rows, vocab, dtype=BF16, device=DEVICE)
    logits = torch.zeros_like(computed)
    positions = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    tokens, flags = trial.outputs()
    trial.sampler.sample(logits, positions, rows, tokens, flags)  # loads the kernel; rows are idle
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(computed, 2.0, out=logits)
        trial.sampler.sample(logits, positions, rows, tokens, flags, overlap)
    for step in range(4):
        queries = [random_query(rng, vocab) for _ in range(rows)]
        computed.copy_(normal(rows, vocab, seed=step, scale=1.0).to(BF16))
        want, _ = trial.draw(computed * 2.0, queries, first_key=100 * step)
        for row, query in enumerate(queries):  # the plain draw has counted its tokens: start again
            trial.sampler.forget(100 * step + row)
            trial.sampler.set_row(row, 100 * step + row, query.draw, query.context)
        trial.sampler.upload()
        positions.copy_(torch.tensor([len(query.context) - 1 for query in queries]))
        graph.replay()
        assert tokens.tolist() == want


def test_steady_steps_neither_allocate_nor_synchronise(library: CudaLibrary) -> None:
    vocab, rows = 32_000, 16
    trial = Trial(library, vocab, rows)
    logits = normal(rows, vocab).to(BF16).to(DEVICE)
    positions = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    tokens, flags = trial.outputs()
    draws = [Draw(replace(PENALIZED[row % 4], seed=row), 1) for row in range(rows)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            if step % 5 == 0:
                for row, draw in enumerate(draws):
                    trial.sampler.set_row(row, 100 * step + row, draw, [row])
            trial.sampler.upload()
            trial.sampler.sample(logits, positions, rows, tokens, flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert min(tokens.tolist()) >= 0


def test_rows_at_negative_positions_draw_nothing_and_count_nothing(library: CudaLibrary) -> None:
    """So a captured launch for a whole bucket may hold rows whose sequences have left or moved."""
    vocab, rows = 257, 8
    trial = Trial(library, vocab, rows)
    sampling = Sampling(frequency_penalty=50.0)  # a token that was counted is not the likeliest again
    for row in range(rows):
        trial.sampler.set_row(row, row, Draw(sampling, prompt_length=3), [0, 1, 2])
    trial.sampler.upload()
    logits = normal(rows, vocab).to(DEVICE, BF16)
    likeliest = torch.arange(10, 10 + rows, dtype=torch.int32, device=DEVICE)
    logits[torch.arange(rows), likeliest.long()] = 20.0
    positions = torch.tensor([2, -1] * (rows // 2), dtype=torch.int32, device=DEVICE)
    tokens, flags = trial.outputs()
    trial.sampler.sample(logits, positions, rows, tokens, flags)
    assert tokens[1::2].tolist() == flags[1::2].tolist() == [UNTOUCHED] * (rows // 2)
    assert torch.equal(tokens[::2], likeliest[::2])
    positions.fill_(3)
    trial.sampler.sample(logits, positions, rows, tokens, flags)
    assert (tokens == likeliest).tolist() == [False, True] * (rows // 2)
