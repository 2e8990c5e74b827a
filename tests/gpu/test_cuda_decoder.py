"""The forward pass in bf16 against the reference decoder, at every boundary of blocks, chunks and prefixes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.engine.cuda.runner import CudaRunner
from bench.cuda_logits import all_logits, decode_logits, prefill, step
from bench.forced_tokens import distance
from tests.gpu.gpu_engines import BLOCK, MODELS, PLAIN, Reference, cuda_runner, lines

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NO_WORSE = 1.25  # times what the reference loses by computing in bf16
SPARSE = 2.0  # the same for experts: a row near the border between two of them may fall on either side


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.rsplit("/", 1)[-1])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runner(model: str) -> Iterator[CudaRunner]:
    with cuda_runner(model) as made:
        yield made


@pytest.fixture(scope="module")
def no_worse(exact: Reference) -> float:
    return NO_WORSE if exact.spec.moe is None else SPARSE


@pytest.fixture(scope="module")
def exact(model: str) -> Reference:
    return Reference(model, torch.float32)


@pytest.fixture(scope="module")
def narrow(model: str) -> Reference:
    return Reference(model, torch.bfloat16)


def test_whole_prompts_are_as_close_to_float32_as_the_reference_in_bf16(
    runner: CudaRunner, exact: Reference, narrow: Reference, no_worse: float
) -> None:
    """Several prompts in one step, and so of several lengths in one packed batch."""
    made = lines([70, 33, 1, 64, 17, 2], exact.spec.vocab_size)
    made.sort(key=lambda line: len(line.tokens) > 1)  # a prompt of one token is a decode row, and those come first
    found = all_logits(runner, [line.part(len(line.tokens)) for line in made])
    for line in made:
        runner.forget(line.key)
    wanted = torch.cat([exact.logits(line.tokens) for line in made])
    allowed = distance(torch.cat([narrow.logits(line.tokens) for line in made]), wanted)
    assert distance(found, wanted) <= no_worse * allowed


def test_decoding_is_as_close_to_float32_as_the_reference_in_bf16(
    runner: CudaRunner, exact: Reference, narrow: Reference, no_worse: float
) -> None:
    """Over block boundaries, in batches of every kind: fused products for few rows, plain ones for more."""
    for count in (1, 3, 8, 20):
        made = lines([5 + 7 * index % 45 for index in range(count)], exact.spec.vocab_size, seed=count)
        prefill(runner, made)
        found: list[torch.Tensor] = []
        for _ in range(BLOCK + 2):
            found.append(decode_logits(runner, made)[1])
        for line in made:
            runner.forget(line.key)
        wanted = torch.cat([exact.logits(line.tokens[:-1])[-len(found) :] for line in made])
        allowed = distance(torch.cat([narrow.logits(line.tokens[:-1])[-len(found) :] for line in made]), wanted)
        assert distance(torch.stack(found, dim=1).flatten(0, 1), wanted) <= no_worse * allowed, count


def test_a_prompt_may_be_cut_anywhere(runner: CudaRunner, exact: Reference, narrow: Reference, no_worse: float) -> None:
    """Every cut of a prompt around its block boundaries, also behind a prefix that is in the pool already."""
    length = 2 * BLOCK + 5
    tokens = lines([length], exact.spec.vocab_size, seed=3)[0].tokens
    wanted = exact.logits(tokens)
    allowed = no_worse * distance(narrow.logits(tokens), wanted)
    for cut in range(1, length):
        line = lines([length], exact.spec.vocab_size, seed=3)[0]
        head = all_logits(runner, [line.part(cut)])
        tail = all_logits(runner, [line.part(length - cut)])
        runner.forget(line.key)
        # One cut has fewer values to average over than all rows, so a row may lose somewhat more.
        assert distance(torch.cat((head, tail)), wanted) <= 1.5 * allowed, cut


def test_chunks_beside_decoding_rows_change_neither(
    runner: CudaRunner, exact: Reference, narrow: Reference, no_worse: float
) -> None:
    """Decode rows are padded over the chunks' rows; both must come out right, for fewer and more rows than padding."""
    for decoding, chunk in ((1, 40), (3, 2), (9, 2), (9, 90)):
        made = lines([10 + index for index in range(decoding)], exact.spec.vocab_size, seed=5)
        prefill(runner, made)
        newcomer = lines([chunk], exact.spec.vocab_size, seed=6, keys=100)[0]
        newcomer.blocks = list(range(200, 210))
        found = all_logits(runner, [*(line.part(1) for line in made), newcomer.part(chunk)])
        for line in (*made, newcomer):
            runner.forget(line.key)
        wanted = torch.cat([*(exact.logits(line.tokens)[-1:] for line in made), exact.logits(newcomer.tokens)])
        loss = torch.cat([*(narrow.logits(line.tokens)[-1:] for line in made), narrow.logits(newcomer.tokens)])
        assert distance(found, wanted) <= 1.5 * no_worse * distance(loss, wanted), (decoding, chunk)


def test_graphs_compute_the_same_bits_as_eager_launches(runner: CudaRunner, exact: Reference) -> None:
    for count in (1, 2, 3, 4, 7, 8, 16, 24):
        made = lines([3 + index for index in range(count)], exact.spec.vocab_size, seed=count, room=20)
        prefill(runner, made)
        eager, replayed = decode_logits(runner, made)
        assert torch.equal(eager, replayed), count
        for line in made:
            runner.forget(line.key)


def test_a_step_writes_nothing_but_its_own_rows() -> None:
    """Padding rows and the rows of others: every byte of the pool that is not a new row's stays as it was."""
    with cuda_runner(PLAIN) as runner:
        pool = runner._machinery.pool
        made = lines([5, 18, 33], 384)
        prefill(runner, made)
        before = pool.clone()
        step(runner, [line.part(1) for line in made])
        newcomer = lines([20], 384, keys=50)[0]
        newcomer.blocks = [200, 201]
        step(runner, [newcomer.part(20)])
        changed = (pool.view(torch.int16) != before.view(torch.int16)).any(dim=(1, 2, 3, 5))
        wanted = torch.zeros_like(changed)
        for line in made:
            wanted[line.blocks[(line.computed - 1) // BLOCK], (line.computed - 1) % BLOCK] = True
        wanted[200], wanted[201, :4] = True, True
        assert torch.equal(changed, wanted)


def test_what_stands_in_unused_parts_of_blocks_is_never_read() -> None:
    def answers(fill: float) -> list[list[int]]:
        with cuda_runner(PLAIN) as runner, torch.inference_mode():
            runner._machinery.pool[:-1].fill_(fill)
            torch.cuda.synchronize()
            made = lines([5, 16, 33, 70], 384)
            prefill(runner, made)
            for _ in range(BLOCK + 1):
                result = step(runner, [line.part(1) for line in made])
                for line, token_id in zip(made, result.token_ids, strict=True):
                    line.take(token_id)
            return [line.tokens for line in made]

    assert answers(float("nan")) == answers(0.0)


def test_blocks_far_into_a_large_pool_are_addressed(exact: Reference, model: str) -> None:
    """Past 2^31 elements, where 32-bit arithmetic would wrap into other blocks."""
    if not model.startswith("random:"):
        pytest.skip("a tiny model's pool is never that large")
    blocks = 2**31 // (exact.spec.layers * 2 * exact.spec.kv_size * BLOCK) + 2000
    answers: list[list[int]] = []
    with cuda_runner(model, kv_blocks=blocks) as runner:
        for shift in (0, blocks - 40):
            made = lines([5, 20, 33, 70], exact.spec.vocab_size, seed=4, keys=100 * len(answers))
            for line in made:
                line.blocks = [block + shift for block in line.blocks]
            prefill(runner, made)
            for _ in range(BLOCK):
                decode_logits(runner, made)
            for line in made:
                runner.forget(line.key)
            answers.append([token for line in made for token in line.tokens])
    assert answers[0] == answers[1]
