"""The runner on the GPU: one step ahead, alone or together, without waiting, allocating or harming a neighbour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.core.errors import ConfigError, InvalidRequest
from baton.core.types import Sampling
from baton.engine.config import EngineConfig
from baton.engine.cuda.flight import Slot
from baton.engine.cuda.runner import CudaRunner
from baton.engine.load import build_runner
from baton.engine.runner import Draw
from bench.cuda_logits import GREEDY, Line, all_logits, prefill, step
from tests.goldens import TINY
from tests.gpu.gpu_engines import BLOCK, PLAIN, cuda_runner, decode_ahead, decode_lockstep, lines

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = 384
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, frequency_penalty=0.1)


@pytest.fixture(scope="module")
def runner() -> Iterator[CudaRunner]:
    with cuda_runner(PLAIN) as made:
        yield made


def sampled(made: list[Line]) -> list[Line]:
    """Every other line draws with temperature and penalties."""
    for line in made[::2]:
        line.draw = Draw(SAMPLED, len(line.tokens))
    return made


def forget(runner: CudaRunner, made: list[Line]) -> None:
    for line in made:
        runner.forget(line.key)


@pytest.mark.parametrize("directory", TINY, ids=lambda path: path.name)
def test_tiny_goldens_are_exact_in_float32_by_the_reference(directory: Path) -> None:
    from baton.engine.client import threaded_engine
    from tests.goldens import read_goldens
    from tests.integration.test_real_engine_goldens import assert_exact

    config = EngineConfig(str(directory), dtype="float32", device="cuda", backend="torch", kv_blocks=128)

    async def main() -> None:
        async with threaded_engine(build_runner(config), config) as engine:
            await assert_exact(engine, read_goldens(directory / "golden.jsonl"))

    asyncio.run(main())


def test_one_step_ahead_draws_what_lockstep_draws(runner: CudaRunner) -> None:
    answers: list[list[list[int]]] = []
    for decode in (decode_lockstep, decode_ahead):
        made = sampled(lines([5, 16, 31, 47, 2], VOCABULARY, seed=1, keys=1000 * len(answers)))
        prefill(runner, made)
        decode(runner, made, 2 * BLOCK + 3)
        forget(runner, made)
        answers.append([line.tokens for line in made])
    assert answers[0] == answers[1]


def test_sequences_come_and_go_without_harm_to_the_others(runner: CudaRunner) -> None:
    """Rows move when a neighbour leaves, tokens in flight and penalty counts with them: the steps are the same ones."""
    answers: list[list[list[int]]] = []
    for depth in (0, 1):
        made = sampled(lines([5, 16, 31, 47, 2, 9], VOCABULARY, seed=2, keys=1000 * len(answers)))
        staying = [made[1], made[2], made[4]]
        late = lines([1], VOCABULARY, seed=12, keys=500 + len(answers))
        late[0].blocks = list(range(100, 110))
        prefill(runner, made)
        batches = [made] * 3 + [list(reversed(staying))] * 4 + [[*late, *staying]] * 6
        flights: list[list[Line]] = []
        for batch in batches:
            if batch is not made:
                forget(runner, [made[0], made[3], made[5]])
            runner.launch([line.part(1) for line in batch])
            flights.append(batch)
            if len(flights) > depth:
                _land(runner, flights.pop(0))
        while flights:
            _land(runner, flights.pop(0))
        forget(runner, [*made, *late])
        answers.append([line.tokens for line in (*made, *late)])
    assert answers[0] == answers[1]


def _land(runner: CudaRunner, batch: list[Line]) -> None:
    for line, token_id in zip(batch, runner.collect().token_ids, strict=True):
        line.take(token_id)


def test_chunks_and_decoding_rows_share_steps_one_ahead(runner: CudaRunner) -> None:
    old = lines([8, 20, 33], VOCABULARY, seed=3)
    prefill(runner, old)
    newcomer = lines([100], VOCABULARY, seed=4, keys=70)[0]
    newcomer.blocks = list(range(120, 132))
    for size in (1, 30, 1, 60, 8):
        parts = [*(line.part(1) for line in old), newcomer.part(size)]
        runner.launch(parts)
        result = runner.collect()
        for line, token_id in zip(old, result.token_ids, strict=False):
            line.take(token_id)
        assert (result.token_ids[-1] is None) == (newcomer.computed < 100)
    newcomer.take(result.token_ids[-1])
    decode_ahead(runner, [*old, newcomer], 10)
    forget(runner, [*old, newcomer])
    for line in (*old, newcomer):
        assert len(line.tokens) == line.computed + 1


@pytest.mark.parametrize("length", [2, 17, 100, 250])
def test_all_kv_of_a_chunk_is_in_its_blocks_once_the_runner_says_so(runner: CudaRunner, length: int) -> None:
    line = lines([length], VOCABULARY, seed=length)[0]
    blocks = line.blocks[: -(-length // BLOCK)]
    runner.write_blocks(blocks, bytes(len(blocks) * runner.card.format.block_bytes))
    for scored in (False, True):  # the scores of all rows take their time after the last KV
        line.computed = 0
        part = line.part(length)
        runner.launch([part._replace(prompt_logprobs=1, targets=line.tokens[1:]) if scored else part])
        deadline = time.monotonic() + 30
        while not runner.has_filled():
            assert time.monotonic() < deadline, "the step never says so"
        told = runner.read_blocks(blocks)
        runner.collect()
        assert told == runner.read_blocks(blocks)
        assert any(told)
        assert not runner.has_filled(), "no step is in flight"
        line.in_flight = 0
    runner.forget(line.key)


def test_a_step_of_decode_rows_says_nothing_of_its_kv(runner: CudaRunner) -> None:
    made = lines([20], VOCABULARY, seed=13)
    prefill(runner, made)
    runner.launch([made[0].part(1)])
    torch.cuda.synchronize()
    assert not runner.has_filled()
    runner.collect()
    forget(runner, made)


@pytest.fixture
def slow_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with chunks take a tenth of a second more after their last KV."""
    mark = Slot.mark_filled

    def mark_and_wait(slot: Slot) -> None:
        mark(slot)
        torch.cuda._sleep(200_000_000)

    monkeypatch.setattr(Slot, "mark_filled", mark_and_wait)


@pytest.mark.usefixtures("slow_ends")
def test_who_looks_while_a_step_is_waited_for_sees_its_kv_before_its_end(runner: CudaRunner) -> None:
    made = lines([40, 30], VOCABULARY, seed=14)
    seen: list[bool] = []
    runner.while_waiting(lambda: seen.append(runner.has_filled()))
    for line in made:
        runner.launch([line.part(len(line.tokens))])  # two steps in flight: it speaks of the older one
    for line in made:
        line.take(runner.collect().token_ids[0])
        assert seen[-1], "KV is told of while the rest is computed"
        seen.clear()
    runner.while_waiting(lambda: None)
    forget(runner, made)


@pytest.mark.usefixtures("slow_ends")
def test_an_engine_tells_of_a_prompts_blocks_while_its_first_token_is_to_come() -> None:
    from baton.engine.client import threaded_engine
    from tests.contract.engine_driving import all_filled, prompt, request
    from tests.held_runner import HeldRunner

    config = EngineConfig(PLAIN, device="cuda", kv_blocks=256, max_step_tokens=256, max_running=24)

    async def main() -> None:
        held = HeldRunner(build_runner(config))
        async with threaded_engine(held, config) as engine, engine.prefill(request(prompt(300))) as run:
            assert (await all_filled(run))[-1].tokens == 300
            first = asyncio.ensure_future(run.first_token())
            await asyncio.sleep(0)
            assert not first.done(), "the step is held"
            held.release()
            await first

    asyncio.run(main())


def test_log_probabilities_are_those_of_the_raw_logits(runner: CudaRunner) -> None:
    length = 40
    line = lines([length], VOCABULARY, seed=5)[0]
    line.draw = Draw(GREEDY, length, (), 3)
    part = line.part(length)._replace(prompt_logprobs=2, targets=line.tokens[1:])
    result = step(runner, [part])
    runner.forget(line.key)
    detail = result.details[0]
    again = lines([length], VOCABULARY, seed=5, keys=9)[0]
    logits = all_logits(runner, [again.part(length)]).log_softmax(dim=-1)
    runner.forget(again.key)
    assert len(detail.prompt_logprobs) == length - 1
    for row, (score, target) in enumerate(zip(detail.prompt_logprobs, line.tokens[1:], strict=True)):
        assert score.token_id == target
        assert score.logprob == pytest.approx(float(logits[row, target]), abs=1e-3)
        assert [value for _, value in score.top] == pytest.approx(logits[row].topk(2).values.tolist(), abs=1e-3)
    assert detail.logprob is not None
    assert detail.logprob.token_id == result.token_ids[0] == int(logits[-1].argmax())
    assert detail.logprob.logprob == pytest.approx(float(logits[-1].max()), abs=1e-3)
    assert len(detail.logprob.top) == 3


def test_logits_that_are_not_finite_fail_their_own_request_alone() -> None:
    with cuda_runner(PLAIN) as runner, torch.inference_mode():
        made = lines([7, 12, 20], VOCABULARY - 1, seed=6)
        bad = VOCABULARY - 1
        prefill(runner, made)
        decode_ahead(runner, made, 5)
        forget(runner, made)
        healthy = [line.tokens for line in made]
        runner._machinery.decoder._embedding[bad].fill_(float("nan"))
        made = lines([7, 12, 20], VOCABULARY - 1, seed=6, keys=20)
        made[1].tokens[3] = bad
        results = [step(runner, [line.part(len(line.tokens))]) for line in made]
        assert results[1].token_ids == [None]
        error = results[1].details[0].error
        assert error is not None
        assert "not finite at position 12" in error.message
        for line, result in zip(made, results, strict=True):
            line.take(result.token_ids[0] if line is not made[1] else 0)
        for _ in range(5):
            result = step(runner, [line.part(1) for line in made])
            assert list(result.details) == [1]
            for index in (0, 2):
                made[index].take(result.token_ids[index])
            made[1].take(0)
        assert [made[index].tokens for index in (0, 2)] == [healthy[index] for index in (0, 2)]


def test_a_request_that_cannot_be_drawn_for_fails_alone(runner: CudaRunner) -> None:
    made = lines([5, 6], VOCABULARY, seed=8)
    made[0].draw = Draw(Sampling(logit_bias=tuple((0, 1.0) for _ in range(5000))), 5)
    result = step(runner, [line.part(len(line.tokens)) for line in made])
    assert isinstance(result.details[0].error, InvalidRequest)
    assert result.token_ids[0] is None
    assert result.token_ids[1] is not None
    forget(runner, made)


def test_blocks_read_from_one_sequence_serve_another(runner: CudaRunner) -> None:
    first = lines([37], VOCABULARY, seed=9)[0]
    prefill(runner, [first])
    payload = runner.read_blocks(first.blocks[:3])
    assert len(payload) == 3 * runner.card.format.block_bytes
    second = lines([37], VOCABULARY, seed=9, keys=1)[0]
    second.blocks = list(range(60, 70))
    runner.launch([first.part(1)])  # a step in flight is neither waited for nor disturbed
    runner.write_blocks(second.blocks[:3], payload)
    assert runner.read_blocks(second.blocks[:3]) == payload
    first.take(runner.collect().token_ids[0])
    second.computed = 37
    second.tokens.append(first.tokens[37])
    decode_ahead(runner, [first], 8)
    decode_ahead(runner, [second], 9)
    assert first.tokens == second.tokens
    forget(runner, [first, second])


def test_steady_decoding_neither_allocates_nor_synchronises(runner: CudaRunner) -> None:
    made = sampled(lines([5 + index for index in range(20)], VOCABULARY, seed=10, room=240))
    prefill(runner, made)
    decode_ahead(runner, made, 4)

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    free, before = torch.cuda.mem_get_info()[0], allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode_ahead(runner, made, 200)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before
    assert torch.cuda.mem_get_info()[0] == free
    forget(runner, made)


def test_every_step_is_timed_on_the_device(runner: CudaRunner) -> None:
    """Decode steps and steps with chunks, one ahead and in lockstep; no step, no gap and no wait is longer than all."""
    made = lines([5, 9, 40], VOCABULARY, room=200)
    torch.cuda.synchronize()
    before, started = runner.times, time.perf_counter()
    prefill(runner, made)
    seen = [before.device, runner.times.device]
    for steps in (1, 40):
        decode_ahead(runner, made, steps)
        seen.append(runner.times.device)
    took = time.perf_counter() - started
    assert seen == sorted(set(seen)), "a step took no time"
    after = runner.times
    assert 0.0 <= after.device_idle - before.device_idle < took
    assert 0.0 < after.device - before.device < took
    assert 0.0 < after.waited - before.waited < took
    forget(runner, made)


def test_prefill_steps_do_not_synchronise_and_leave_memory_as_it_was(runner: CudaRunner) -> None:
    def run(seed: int) -> None:
        for length in (200, 100, 37, 256):
            line = lines([length], VOCABULARY, seed=seed)[0]
            runner.launch([line.part(length)])
            runner.collect()
            runner.forget(line.key)

    run(11)
    free = torch.cuda.mem_get_info()[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(50):
            run(seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.mem_get_info()[0] == free


def test_a_pool_without_a_given_size_takes_what_is_left_and_no_more() -> None:
    total = torch.cuda.mem_get_info()[1]
    with cuda_runner(PLAIN, kv_blocks=0, kv_cache_mb=0, gpu_memory_share=0.5) as runner:
        free = torch.cuda.mem_get_info()[0]
        assert free >= 0.48 * total
        assert free <= 0.56 * total
        assert runner.total_blocks > 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_blocks": 10**9}, r"engine\.kv_cache_mb .* must fit the .* available"),
        ({"kv_blocks": 0, "kv_cache_mb": 0, "gpu_memory_share": 1e-6}, r"engine\.model: the weights take .* available"),
    ],
)
def test_what_does_not_fit_the_gpu_is_refused_with_figures(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message), cuda_runner(PLAIN, **changes):
        pass


def test_a_runner_gives_its_memory_back() -> None:
    with cuda_runner(PLAIN):
        pass
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with cuda_runner(PLAIN):
        pass
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
