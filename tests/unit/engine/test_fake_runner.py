from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.core.errors import CorruptTransfer
from baton.core.types import Sampling
from baton.engine.fake import EOS, FakeRunner, fake_card
from baton.engine.runner import Draw, Part, PartDetail

TOKENS = list(range(10, 20))
BLOCKS = [5, 1, 3]
GREEDY = Draw(Sampling(), prompt_length=10)


def runner() -> FakeRunner:
    return FakeRunner(fake_card(block_size=4), 8)


Result = tuple[int | None, PartDetail]


def part(
    tokens: Sequence[int], start: int, blocks: Sequence[int], draw: Draw | None = None, *scored: object, key: int = 1
) -> Part:
    return Part(key, tokens, start, len(tokens), blocks, draw, *scored)  # type: ignore[arg-type]


def compute(fake: FakeRunner, wanted: Part) -> Result:
    fake.launch([wanted])
    result = fake.collect()
    [token_id] = result.token_ids
    return token_id, result.details.get(0, PartDetail())


def error_of(fake: FakeRunner, wanted: Part) -> object:
    return compute(fake, wanted)[1].error


def drawn(draw: Draw, tokens: list[int] = TOKENS) -> int:
    token_id = compute(runner(), part(tokens, 0, BLOCKS, draw))[0]
    assert token_id is not None
    return token_id


def test_a_token_takes_sixteen_bytes() -> None:
    assert fake_card(block_size=16).format.block_bytes == 256


@pytest.mark.parametrize("start", range(1, 10))
def test_chunks_write_the_same_bytes_as_one_step(start: int) -> None:
    whole, chunked = runner(), runner()
    expected = compute(whole, part(TOKENS, 0, BLOCKS, GREEDY))
    assert compute(chunked, part(TOKENS[:start], 0, BLOCKS)) == (None, PartDetail())
    assert compute(chunked, part(TOKENS, start, BLOCKS, GREEDY)) == expected
    assert chunked.read_blocks(BLOCKS) == whole.read_blocks(BLOCKS)


@pytest.mark.parametrize("position", range(9))
def test_one_wrong_byte_anywhere_before_the_part_is_noticed(position: int) -> None:
    fake = runner()
    compute(fake, part(TOKENS[:9], 0, BLOCKS))
    block = BLOCKS[position // 4]
    payload = bytearray(fake.read_blocks([block]))
    payload[position % 4 * 16 + 7] ^= 1
    fake.write_blocks([block], bytes(payload))
    assert isinstance(error_of(fake, part(TOKENS, 9, BLOCKS, GREEDY)), CorruptTransfer)


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_was_right_before_is_checked_again_after_a_write(block: int) -> None:
    fake = runner()
    compute(fake, part(TOKENS[:8], 0, BLOCKS))
    for end in (9, 10):
        assert error_of(fake, part(TOKENS[:end], end - 1, BLOCKS)) is None
    right = fake.read_blocks(BLOCKS[block : block + 1])
    fake.write_blocks(BLOCKS[block : block + 1], bytes(64))
    assert isinstance(error_of(fake, part([*TOKENS, 20], 10, BLOCKS, GREEDY)), CorruptTransfer)
    fake.write_blocks(BLOCKS[block : block + 1], right)
    assert error_of(fake, part([*TOKENS, 20], 10, BLOCKS, GREEDY)) is None


def test_other_tokens_or_blocks_than_those_that_were_right_are_noticed() -> None:
    fake = runner()
    compute(fake, part(TOKENS[:9], 0, BLOCKS))
    assert error_of(fake, part(TOKENS, 9, BLOCKS)) is None
    assert isinstance(error_of(fake, part([9, *TOKENS[1:]], 9, BLOCKS)), CorruptTransfer)
    assert isinstance(error_of(fake, part(TOKENS, 9, [0, *BLOCKS[1:]])), CorruptTransfer)


def test_the_bytes_of_another_context_are_noticed() -> None:
    fake = runner()
    compute(fake, part([9, *TOKENS[1:9]], 0, BLOCKS))
    assert isinstance(error_of(fake, part(TOKENS, 9, BLOCKS, GREEDY)), CorruptTransfer)


def test_bytes_move_between_pools_whatever_the_block_numbers() -> None:
    source, target = runner(), runner()
    compute(source, part(TOKENS[:9], 0, BLOCKS))
    target.write_blocks([0, 7, 2], source.read_blocks(BLOCKS))
    expected = compute(source, part(TOKENS, 9, BLOCKS, GREEDY))
    assert compute(target, part(TOKENS, 9, [0, 7, 2], GREEDY)) == expected


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
    token_id, detail = compute(runner(), part(TOKENS, 0, BLOCKS, Draw(Sampling(), 10, logprobs=5)))
    assert detail.logprob is not None
    assert detail.logprob.token_id == token_id == detail.logprob.top[0][0]
    values = [value for _, value in detail.logprob.top]
    assert values == sorted(values, reverse=True)
    assert detail.logprob.logprob == values[0] < 0


def test_prompt_logprobs_name_the_targets() -> None:
    assert isinstance(error_of(runner(), part(TOKENS[:6], 2, BLOCKS, None, 1, TOKENS[3:7])), CorruptTransfer)
    fake = runner()
    compute(fake, part(TOKENS[:2], 0, BLOCKS))
    _, detail = compute(fake, part(TOKENS[:6], 2, BLOCKS, None, 1, TOKENS[3:7]))
    assert [entry.token_id for entry in detail.prompt_logprobs] == TOKENS[3:7]
    assert all(len(entry.top) == 1 for entry in detail.prompt_logprobs)


# --- one step ahead ---------------------------------------------------------------------------------------------------


def ahead() -> FakeRunner:
    return FakeRunner(fake_card(block_size=4), 8, steps_ahead=1)


def test_a_part_goes_on_from_the_token_in_flight() -> None:
    first, _ = compute(runner(), part(TOKENS, 0, BLOCKS, GREEDY))
    assert first is not None
    second, _ = compute(runner(), part([*TOKENS, first], 0, BLOCKS, GREEDY))
    fake = ahead()
    fake.launch([part(TOKENS, 0, BLOCKS, GREEDY)])
    fake.launch([Part(1, TOKENS, 10, 11, BLOCKS, GREEDY)])
    assert [fake.collect().token_ids, fake.collect().token_ids] == [[first], [second]]


def test_a_token_that_the_step_before_does_not_draw_is_refused() -> None:
    unknown = Part(1, TOKENS, 10, 11, BLOCKS, GREEDY)
    with pytest.raises(RuntimeError, match="neither known nor being drawn"):
        ahead().launch([unknown])
    for before in (part(TOKENS, 0, BLOCKS), part(TOKENS, 0, BLOCKS, GREEDY, key=2)):
        fake = ahead()
        fake.launch([before])
        with pytest.raises(RuntimeError, match="neither known nor being drawn"):
            fake.launch([unknown])
    fake = ahead()
    fake.launch([part(TOKENS, 0, BLOCKS, GREEDY)])
    fake.forget(1)
    with pytest.raises(RuntimeError, match="neither known nor being drawn"):
        fake.launch([unknown])


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_more_steps_in_flight_than_promised_are_refused(steps_ahead: int) -> None:
    fake = FakeRunner(fake_card(block_size=4), 8, steps_ahead=steps_ahead)
    for _ in range(steps_ahead + 1):
        fake.launch([part(TOKENS[:4], 0, BLOCKS)])
    with pytest.raises(RuntimeError, match="in flight"):
        fake.launch([part(TOKENS[:4], 0, BLOCKS)])


def test_a_part_after_a_failed_one_yields_nothing() -> None:
    fake = ahead()
    fake.launch([part(TOKENS, 9, BLOCKS, GREEDY)])
    fake.launch([Part(1, TOKENS, 10, 11, BLOCKS, GREEDY)])
    failed, after = fake.collect(), fake.collect()
    assert isinstance(failed.details[0].error, CorruptTransfer)
    assert (after.token_ids, after.details) == ([None], {})


def test_a_block_given_away_while_a_step_is_in_flight_is_noticed() -> None:
    fake = ahead()
    compute(fake, part(TOKENS[:9], 0, BLOCKS))
    fake.launch([part(TOKENS, 9, BLOCKS, GREEDY)])
    fake.write_blocks(BLOCKS[:1], bytes(64))
    assert isinstance(fake.collect().details[0].error, CorruptTransfer)
