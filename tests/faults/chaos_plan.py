"""One round of chaos: requests of all kinds, and what breaks under them. A pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton.core.types import GenerateRequest, Sampling, StopRules

REQUEST_SECONDS: Final = 60.0
ROUND_SECONDS: Final = 1.5  # in which requests arrive and faults begin
LONGEST_PROMPT: Final = 400  # ids below 512: shorter than ``KV_BYTES`` as tokens
WORKERS: Final = ("prefill-0", "prefill-1", "decode-0", "decode-1")
OTHERS: Final = ("planner-0", "kvtransfer-0", "gateway-0", "gateway-1", "redis")
LONGEST_FREEZE: Final = 4.0


class Kind(StrEnum):
    KILL = "kill"
    TERMINATE = "terminate"
    STOP = "stop"  # and go on after a while
    RESET = "reset"  # all connections to a worker
    SLOW = "slow"  # all connections to a worker, for a while
    CORRUPT = "corrupt"  # one bit of the next offer to a worker
    HOLD = "hold"  # the calls of one connection to a worker, for a while


@dataclass(frozen=True, slots=True)
class Fault:
    """Begins ``delay`` seconds into the round and is mended ``seconds`` later. ``bits`` decides which bit flips."""

    kind: Kind
    target: str
    delay: float
    seconds: float
    bits: int

    def __str__(self) -> str:
        return f"{self.kind} {self.target} at {self.delay:.1f} s for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that comes ``delay`` seconds into the round. Its caller leaves after ``leave_after`` tokens of choice
    0, for good or, with ``returns``, to ask for the rest."""

    request: GenerateRequest
    delay: float
    leave_after: int | None = None
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    asks: Sequence[Ask]
    faults: Sequence[Fault]


def plan_round(seed: int, number: int) -> Round:
    """Round ``number`` of a run: the same for the same arguments, whatever was played before."""
    draw = random.Random(f"{seed}/{number}")
    is_burst = draw.random() < 0.3  # all at once, after the quiet between two rounds
    asks = [_ask(draw, f"{seed}-{number}-{index}", is_burst) for index in range(draw.randint(6, 14))]
    targets = draw.sample(WORKERS, draw.randint(1, 2)) + draw.sample(OTHERS, draw.randint(0, 2))
    return Round(number, asks, [_fault(draw, target) for target in targets])


def _ask(draw: random.Random, request_id: str, is_burst: bool) -> Ask:
    seed = draw.randrange(2**32)
    shared = tuple(random.Random(draw.randrange(4)).randrange(3, 500) for _ in range(64))  # prefixes that recur
    own = tuple(draw.randrange(3, 500) for _ in range(draw.randint(1, LONGEST_PROMPT - len(shared))))
    max_tokens = draw.randint(1, 80)
    request = GenerateRequest(
        prompt_token_ids=(shared + own) if draw.random() < 0.5 else own,
        max_tokens=max_tokens,
        sampling=_sampling(draw),
        seed=seed,
        stop=StopRules(ignore_eos=draw.random() < 0.7),
        stop_strings=_stop_strings(draw),
        n=draw.choice((1, 1, 1, 2, 3)),
        logprobs=draw.choice((None, None, 0, 2)),
        request_id=request_id,
        timeout=REQUEST_SECONDS,
    )
    leaves = draw.random() < 0.3
    return Ask(
        request,
        delay=0.0 if is_burst else draw.uniform(0.0, ROUND_SECONDS),
        leave_after=draw.randint(1, max_tokens) if leaves else None,
        returns=draw.random() < 0.5,
    )


def _sampling(draw: random.Random) -> Sampling:
    if draw.random() < 0.4:
        return Sampling()
    penalty = draw.choice((0.0, 0.0, 0.4))
    return Sampling(temperature=draw.choice((0.7, 1.0)), frequency_penalty=penalty, presence_penalty=penalty / 2)


def _stop_strings(draw: random.Random) -> tuple[str, ...]:
    """Short ones, so that some are found."""
    if draw.random() < 0.7:
        return ()
    return tuple("".join(draw.choices("abcdefgh", k=draw.randint(1, 2))) for _ in range(draw.randint(1, 3)))


def _fault(draw: random.Random, target: str) -> Fault:
    kinds = [Kind.KILL, Kind.TERMINATE, Kind.STOP]
    if target in WORKERS:
        kinds += [Kind.RESET, Kind.SLOW, Kind.CORRUPT, Kind.HOLD]
    seconds = draw.uniform(0.1, LONGEST_FREEZE)
    return Fault(draw.choice(kinds), target, draw.uniform(0.0, ROUND_SECONDS), seconds, draw.randrange(2**32))
