"""Finished answers of a load, compared with what the same engine says of them when it has nothing else to do.

Replays have a salt of their own, so that they find nothing in the prefix cache. On an engine whose rows do not depend
on the batch an answer must be equal. Elsewhere each token of a greedy one must be nearly as likely as the likeliest:
a token drawn from a wrong block is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from baton.core.api import EngineApi
from baton.core.streams import closing
from baton.core.types import Sampling, StopRules, TokenRequest
from bench.load_record import LoadRecord

SALT = b"replayed alone"
# Nats by which a greedy token may be less likely than the likeliest. Rounding to bf16 or e4m3 swaps tokens that are
# closer than that; a random token of a random model is several less likely, of a trained one many.
MOST_LOST = 2.0


@dataclass(frozen=True, slots=True)
class Replay:
    """``lost``: nats below the likeliest token, at the worst position; 0 where answers must be equal."""

    tokens: int
    equal_prefix: int
    lost: float
    faults: tuple[str, ...]


def is_greedy(request: TokenRequest) -> bool:
    """Every token is the likeliest one of the raw distribution."""
    return request.sampling == Sampling() and request.stop.min_tokens == 0


async def replay_exactly(engine: EngineApi, record: LoadRecord) -> Replay:
    alone = await answer_alone(engine, record.request)
    same = (alone.token_ids, alone.logprobs, alone.prompt_logprobs, alone.finish) == (
        record.token_ids,
        record.logprobs,
        record.prompt_logprobs,
        record.finish,
    )
    prefix = equal_prefix(alone, record)
    name = record.request.request_id
    fault = f"{name}: alone it is answered otherwise: {prefix} of {len(record.token_ids)} tokens are equal"
    return Replay(len(record.token_ids), prefix, 0.0, () if same else (fault,))


async def replay_nearly(engine: EngineApi, record: LoadRecord) -> Replay:
    """For greedy records: how many leading tokens are equal alone, and how likely each token is after those before."""
    prefix = equal_prefix(await answer_alone(engine, record.request), record)
    prompt = record.request.prompt
    scored = await answer_alone(
        engine,
        TokenRequest(
            f"{record.request.request_id}-scored",
            (*prompt, *record.token_ids),
            stop=StopRules(1, ignore_eos=True),
            prompt_logprobs=1,
        ),
    )
    entries = [entry for entry in scored.prompt_logprobs[len(prompt) :] if entry is not None]
    losses = [entry.top[0][1] - entry.logprob for entry in entries]
    name, count = record.request.request_id, len(record.token_ids)
    faults = [
        f"{name}: output token {index} is {lost:.2f} nats less likely than the likeliest"
        for index, lost in enumerate(losses)
        if not lost <= MOST_LOST
    ]
    if len(losses) != count:
        faults.append(f"{name}: {len(losses)} of {count} tokens were scored")
    return Replay(count, prefix, max(losses, default=0.0), tuple(faults))


async def answer_alone(engine: EngineApi, request: TokenRequest) -> LoadRecord:
    record = LoadRecord(request)
    alone = replace(request, request_id=f"{request.request_id}-alone", salt=SALT, timeout=None)
    async with engine.reserve(alone) as reservation, closing(reservation.decode(None)) as chunks:
        async for chunk in chunks:
            record.add(chunk)
    return record


def equal_prefix(one: LoadRecord, other: LoadRecord) -> int:
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
