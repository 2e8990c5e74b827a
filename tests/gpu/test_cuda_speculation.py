"""Drafts on the GPU: rows of a captured batch, whose tokens are those that the same rows draw without being drafts.

In bfloat16 the bits of a row may depend on the batch's size and on how attention is cut up over all rows. So equality
is of steps with the same rows; whole answers are compared with the float32 model, as answers without drafts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from baton.core.types import Sampling, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.cuda.runner import CudaRunner
from baton.engine.drafter import NgramDrafter
from baton.engine.model_drafter import ModelDrafter
from baton.engine.runner import Draw, DrawnToken, Part
from bench.cuda_logits import GREEDY, Line, prefill, step
from tests.gpu.gpu_engines import BLOCK, MODELS, PLAIN, Reference, cuda_runner, lines
from tests.unit.engine.core_driver import CoreDriver
from tests.unit.engine.oracles import Oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = 384
DRAFTS = 7
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=7)
CONFIG = EngineConfig(
    PLAIN, device="cuda", kv_blocks=256, max_step_tokens=256, max_running=24, speculation="ngram", draft_tokens=DRAFTS
)


@pytest.fixture(scope="module")
def runner() -> Iterator[CudaRunner]:
    with cuda_runner(PLAIN, speculation="ngram") as made:
        yield made


def true_tokens(runner: CudaRunner, line: Line, count: int) -> list[int]:
    """What the line goes on with, token by token. The line stands at the end of its prompt afterwards, as before."""
    start, length = line.computed, len(line.tokens)
    for _ in range(count):
        line.take(step(runner, [line.part(1)]).token_ids[0])
    answer = line.tokens[length:]
    del line.tokens[length:]
    line.computed = start
    runner.forget(line.key)
    return answer


def drafted(line: Line, drafts: Sequence[int]) -> Part:
    return line.part(1)._replace(drafts=tuple(drafts))


def drawn_by(runner: CudaRunner, part: Part) -> tuple[DrawnToken, ...]:
    result = step(runner, [part])
    assert result.token_ids == [None]
    assert result.details[0].error is None
    return result.details[0].drawn


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [5, BLOCK - 3, BLOCK, 70, 150])
def test_rows_of_drafts_draw_what_rows_of_their_own_draw(runner: CudaRunner, sampling: Sampling, length: int) -> None:
    """The same eight rows twice: as one token and its drafts, and as eight sequences with copies of the KV.

    Log-probabilities are equal to the bit. The drafts are forced on the drawn tokens one by one, so all rows count.
    """
    line = lines([length], VOCABULARY, seed=length)[0]
    line.draw = Draw(sampling, length, (), 0)
    prefill(runner, [line])
    drafts: list[int] = true_tokens(runner, line, DRAFTS)
    drawn: tuple[DrawnToken, ...] = ()
    for _ in range(
        DRAFTS + 1
    ):  # in this batch the tokens may be others than one by one: until they are their own drafts
        drawn = drawn_by(runner, replace_drafts(line, drafts))
        if len(drawn) > DRAFTS:
            break
        drafts[len(drawn) - 1] = drawn[-1].token_id
    assert len(drawn) == DRAFTS + 1
    payload = runner.read_blocks(line.blocks[: -(-(length + 1 + DRAFTS) // BLOCK)])
    alone = [copied(runner, line, drafts[:count], payload, number=count) for count in range(DRAFTS + 1)]
    result = step(runner, [each.part(1) for each in alone])
    assert result.token_ids == [token.token_id for token in drawn]
    assert [result.details[row].logprob for row in range(DRAFTS + 1)] == [token.logprob for token in drawn]
    for each in (line, *alone):
        runner.forget(each.key)


def replace_drafts(line: Line, drafts: Sequence[int]) -> Part:
    """The line's last token with ``drafts``, however often."""
    line.computed, line.in_flight = len(line.tokens) - 1, 0
    return drafted(line, drafts)


def copied(runner: CudaRunner, line: Line, more: Sequence[int], payload: bytes, *, number: int) -> Line:
    """A sequence of its own with the line's KV, ``more`` tokens on, in blocks behind all others."""
    width = len(payload) // runner.card.format.block_bytes
    first = runner.total_blocks - (number + 1) * width
    blocks = list(range(first, first + width))
    runner.write_blocks(blocks, payload)
    tokens = [*line.tokens, *more]
    return Line(1000 + number, tokens, blocks, line.draw, computed=len(tokens) - 1)


def test_wrong_drafts_leave_no_trace(runner: CudaRunner) -> None:
    """After rows of wrong drafts a sequence draws as its twin does that never had any: same batches, same bits."""
    answers: list[list[tuple[int | None, object]]] = []
    for wrong in ([], [1, 2, 3, 4, 5, 6, 7]):
        line = lines([30], VOCABULARY, seed=3, keys=len(answers))[0]
        line.draw = Draw(SAMPLED, 30, (), 3)
        prefill(runner, [line])
        told: list[tuple[int | None, object]] = []
        for _ in range(2 * BLOCK):
            if wrong:
                drawn_by(runner, replace_drafts(line, wrong))
                line.computed, line.in_flight = len(line.tokens) - 1, 0
            result = step(runner, [line.part(1)])
            line.take(result.token_ids[0])
            told.append((result.token_ids[0], result.details[0].logprob))
        answers.append(told)
        runner.forget(line.key)
    assert answers[0] == answers[1]


def wanted_requests(count: int, max_tokens: int) -> list[TokenRequest]:
    """Greedy and sampled ones in turn; every third one is held to four ids, so that it repeats itself."""
    made: list[TokenRequest] = []
    for index, line in enumerate(lines([9 + 13 * index % 60 for index in range(count)], VOCABULARY, seed=5)):
        held = tuple((token, 100.0) for token in range(4)) if index % 3 == 0 else ()
        sampling = replace(SAMPLED if index % 2 else GREEDY, seed=index, logit_bias=held)
        made.append(
            TokenRequest(
                f"r{index}", tuple(line.tokens), sampling=sampling, stop=StopRules(max_tokens, ignore_eos=True)
            )
        )
    return made


def answers(driver: CoreDriver, wanted: Sequence[TokenRequest]) -> list[list[int]]:
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    driver.assert_idle()
    return [driver.outcomes[key].tokens for key in keys]


def agreement(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference."""
    same = 0
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        pairs = enumerate(zip(one, other, strict=True))
        same += next((index for index, (a, b) in pairs if a != b), len(one))
    return same / sum(map(len, expected))


def likeliest_share(reference: Reference, request: TokenRequest, answer: Sequence[int]) -> float:
    """How many tokens of a greedy answer are the float32 model's own choice after those before them."""
    rows = reference.logits([*request.prompt, *answer])[len(request.prompt) - 1 : -1]
    return float((rows.argmax(dim=-1).cpu() == torch.tensor(answer)).float().mean())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mistaken", [0, 4])
def test_answers_with_drafts_are_as_good_as_those_without(model: str, mistaken: int) -> None:
    """A crowd on an engine that runs ahead, with an oracle of its answers without drafts: the two agree, but for
    roundings, and the float32 model agrees with both alike."""
    wanted = wanted_requests(6, 40)
    reference = Reference(model, torch.float32)
    config = replace(CONFIG, model=model)
    with cuda_runner(model, speculation="ngram") as runner:
        plain = answers(CoreDriver(runner, replace(config, speculation="off")), wanted)
        known = [[*each.prompt, *answer] for each, answer in zip(wanted, plain, strict=True)]
        driver = CoreDriver(runner, config, Oracle(known, runner.card.vocab_size, mistaken))
        found = answers(driver, wanted)
    shares: list[tuple[float, float]] = []
    for each, one, other in zip(wanted, plain, found, strict=True):
        if not each.sampling.temperature and not each.sampling.logit_bias:
            shares.append((likeliest_share(reference, each, one), likeliest_share(reference, each, other)))
    print(f"{model}: agreement {agreement(found, plain):.3f}, of float32's choice without and with drafts {shares}")
    assert driver.stats.draft_tokens_accepted > 20
    assert all(with_drafts >= without - 0.15 for without, with_drafts in shares)


def test_lookup_and_a_draft_model_share_steps_with_prompts() -> None:
    wanted = wanted_requests(9, 60)
    with cuda_runner(PLAIN, speculation="ngram") as runner, cuda_runner(PLAIN, max_running=32) as small:
        plain = answers(CoreDriver(runner, replace(CONFIG, speculation="off")), wanted)
        for drafter in (NgramDrafter(), ModelDrafter(small, runner.card, CONFIG)):
            driver = CoreDriver(runner, CONFIG, drafter)
            found = answers(driver, wanted)
            rate = driver.stats.draft_tokens_accepted / driver.stats.draft_tokens_proposed
            print(f"{type(drafter).__name__}: accepted {rate:.3f}, agreement {agreement(found, plain):.3f}")
            assert driver.stats.draft_tokens_accepted > 0
            assert driver.stats.steps < sum(map(len, plain))


def test_steps_with_drafts_neither_allocate_nor_synchronise(runner: CudaRunner) -> None:
    made = lines([40, 50, 60], VOCABULARY, seed=8, room=240)
    prefill(runner, made)

    def rounds(count: int) -> None:
        for _ in range(count):
            runner.launch([drafted(line, [1] * DRAFTS) for line in made])
            details = runner.collect().details
            for index, line in enumerate(made):
                accepted = details[index].drawn
                line.tokens += [token.token_id for token in accepted]
                line.computed, line.in_flight = len(line.tokens) - 1, 0

    rounds(4)
    free, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds(25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.cuda.mem_get_info()[0] == free
    for line in made:
        runner.forget(line.key)
