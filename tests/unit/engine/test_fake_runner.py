from __future__ import annotations

import pytest

from baton.core.errors import CorruptTransfer
from baton.core.types import Sampling
from baton.engine.fake import EOS, FakeRunner, fake_card
from baton.engine.runner import Draw, Part, PartResult

TOKENS = list(range(10, 20))
BLOCKS = [5, 1, 3]
GREEDY = Draw(Sampling(), prompt_length=10)


def runner() -> FakeRunner:
    return FakeRunner(fake_card(block_size=4), 8)


def compute(fake: FakeRunner, part: Part) -> PartResult:
    [result] = fake.execute([part])
    return result


def drawn(draw: Draw, tokens: list[int] = TOKENS) -> int:
    token_id = compute(runner(), Part(tokens, 0, BLOCKS, draw)).token_id
    assert token_id is not None
    return token_id


def test_a_token_takes_sixteen_bytes() -> None:
    assert fake_card(block_size=16).format.block_bytes == 256


@pytest.mark.parametrize("start", range(1, 10))
def test_chunks_write_the_same_bytes_as_one_step(start: int) -> None:
    whole, chunked = runner(), runner()
    expected = compute(whole, Part(TOKENS, 0, BLOCKS, GREEDY))
    assert compute(chunked, Part(TOKENS[:start], 0, BLOCKS)) == PartResult()
    assert compute(chunked, Part(TOKENS, start, BLOCKS, GREEDY)) == expected
    assert chunked.read_blocks(BLOCKS) == whole.read_blocks(BLOCKS)


@pytest.mark.parametrize("position", range(9))
def test_one_wrong_byte_anywhere_before_the_part_is_noticed(position: int) -> None:
    fake = runner()
    compute(fake, Part(TOKENS[:9], 0, BLOCKS))
    block = BLOCKS[position // 4]
    payload = bytearray(fake.read_blocks([block]))
    payload[position % 4 * 16 + 7] ^= 1
    fake.write_blocks([block], bytes(payload))
    assert isinstance(compute(fake, Part(TOKENS, 9, BLOCKS, GREEDY)).error, CorruptTransfer)


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_was_right_before_is_checked_again_after_a_write(block: int) -> None:
    fake = runner()
    compute(fake, Part(TOKENS[:8], 0, BLOCKS))
    for end in (9, 10):
        assert compute(fake, Part(TOKENS[:end], end - 1, BLOCKS)).error is None
    right = fake.read_blocks(BLOCKS[block : block + 1])
    fake.write_blocks(BLOCKS[block : block + 1], bytes(64))
    assert isinstance(compute(fake, Part([*TOKENS, 20], 10, BLOCKS, GREEDY)).error, CorruptTransfer)
    fake.write_blocks(BLOCKS[block : block + 1], right)
    assert compute(fake, Part([*TOKENS, 20], 10, BLOCKS, GREEDY)).error is None


def test_other_tokens_or_blocks_than_those_that_were_right_are_noticed() -> None:
    fake = runner()
    compute(fake, Part(TOKENS[:9], 0, BLOCKS))
    assert compute(fake, Part(TOKENS, 9, BLOCKS)).error is None
    assert isinstance(compute(fake, Part([9, *TOKENS[1:]], 9, BLOCKS)).error, CorruptTransfer)
    assert isinstance(compute(fake, Part(TOKENS, 9, [0, *BLOCKS[1:]])).error, CorruptTransfer)


def test_the_bytes_of_another_context_are_noticed() -> None:
    fake = runner()
    compute(fake, Part([9, *TOKENS[1:9]], 0, BLOCKS))
    assert isinstance(compute(fake, Part(TOKENS, 9, BLOCKS, GREEDY)).error, CorruptTransfer)


def test_bytes_move_between_pools_whatever_the_block_numbers() -> None:
    source, target = runner(), runner()
    compute(source, Part(TOKENS[:9], 0, BLOCKS))
    target.write_blocks([0, 7, 2], source.read_blocks(BLOCKS))
    expected = compute(source, Part(TOKENS, 9, BLOCKS, GREEDY))
    assert compute(target, Part(TOKENS, 9, [0, 7, 2], GREEDY)) == expected


def test_a_draw_depends_on_the_seed_only_when_it_is_random() -> None:
    seeds = range(40)
    assert len({drawn(Draw(Sampling(seed=seed), 10)) for seed in seeds}) == 1
    assert len({drawn(Draw(Sampling(temperature=1.0, seed=seed), 10)) for seed in seeds}) > 2
    assert drawn(Draw(Sampling(temperature=1.0, seed=2**64 - 1), 10)) < 512


def test_a_penalised_draw_depends_on_where_the_prompt_ends() -> None:
    penalised = Sampling(repetition_penalty=1.3)
    assert len({drawn(Draw(penalised, length)) for length in range(11)}) > 1
    assert len({drawn(Draw(Sampling(), length)) for length in range(11)}) == 1


def test_forbidden_ids_are_not_drawn() -> None:
    forbidden: list[int] = []
    for _ in range(60):
        token = drawn(Draw(Sampling(), 10, tuple(forbidden)))
        assert token not in forbidden
        forbidden.append(token)


def test_eos_is_rare_but_happens() -> None:
    contexts = [[first, second, *TOKENS[2:]] for first in range(8) for second in range(512)]
    assert 0 < sum(drawn(GREEDY, context) == EOS for context in contexts) < 40


def test_the_greedy_token_is_the_likeliest() -> None:
    result = compute(runner(), Part(TOKENS, 0, BLOCKS, Draw(Sampling(), 10, logprobs=5)))
    assert result.logprob is not None
    assert result.logprob.token_id == result.token_id == result.logprob.top[0][0]
    values = [value for _, value in result.logprob.top]
    assert values == sorted(values, reverse=True)
    assert result.logprob.logprob == values[0] < 0


def test_prompt_logprobs_name_the_targets() -> None:
    result = compute(runner(), Part(TOKENS[:6], 2, BLOCKS, None, 1, TOKENS[3:7]))
    assert isinstance(result.error, CorruptTransfer)
    fake = runner()
    compute(fake, Part(TOKENS[:2], 0, BLOCKS))
    result = compute(fake, Part(TOKENS[:6], 2, BLOCKS, None, 1, TOKENS[3:7]))
    assert [entry.token_id for entry in result.prompt_logprobs] == TOKENS[3:7]
    assert all(len(entry.top) == 1 for entry in result.prompt_logprobs)
