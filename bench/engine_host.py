"""What the engine loop costs the host a step, over a runner that computes nothing: plan, launch, collect, report.

``python -m bench.engine_host`` prints microseconds of CPU time per step by the number of sequences that decode. A step
on the GPU must take longer than that, or the GPU waits.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import socket
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from baton.core.clock import SystemClock
from baton.core.types import ModelCard, StopRules, TokenRequest
from baton.engine.channel import SyncChannel
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.drafter import NoDrafts
from baton.engine.fake import fake_card
from baton.engine.messages import Decode, Reserve
from baton.engine.runner import Part, RunnerTimes, StepResult

PROMPT_TOKENS = 512
MAX_TOKENS = 1024
BLOCK_SIZE = 16
STEPS_PER_ROUND = 100
ROUNDS = 7
WARM_UP_STEPS = 50


class NullRunner:
    """Draws token 7 for everyone, at no cost: what is left is the host's."""

    steps_ahead = 1
    times = RunnerTimes()
    memory = None
    copies = None

    def __init__(self, card: ModelCard, total_blocks: int) -> None:
        self.card = card
        self.total_blocks = total_blocks
        self._results: deque[StepResult] = deque()

    def launch(self, parts: Sequence[Part]) -> None:
        self._results.append(StepResult([7 if part.draw is not None else None for part in parts], {}))

    def while_waiting(self, look: Callable[[], None]) -> None: ...

    def has_filled(self) -> bool:
        return False

    def collect(self) -> StepResult:
        return self._results.popleft()

    def forget(self, key: int) -> None: ...

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        return bytes(len(blocks) * self.card.format.block_bytes)

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None: ...

    def close(self) -> None: ...


def decoding(rows: int) -> EngineCore:
    """An engine in which ``rows`` sequences are past their prompts."""
    card = fake_card(block_size=BLOCK_SIZE)
    blocks = rows * (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE
    config = EngineConfig(max_running=rows, max_step_tokens=8192, max_waiting=rows, block_size=BLOCK_SIZE)
    core = EngineCore(NullRunner(card, blocks), NoDrafts(), config, SystemClock())
    for key in range(rows):
        prompt = tuple((key + i) % card.vocab_size for i in range(PROMPT_TOKENS))
        stop = StopRules(max_tokens=MAX_TOKENS, ignore_eos=True)
        core.handle(Reserve(key, TokenRequest(f"r{key}", prompt, stop=stop, timeout=3600.0)))
    core.step()
    for key in range(rows):
        core.handle(Decode(key, None))
    while core.stats.tokens_generated < rows * WARM_UP_STEPS:
        core.step()
    return core


@contextmanager
def reader() -> Iterator[SyncChannel]:
    """A channel to a process that reads everything, as a front does."""
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL):
        theirs.close()
        channel = SyncChannel(ours)
        try:
            yield channel
        finally:
            channel.close()


def loop_turn(core: EngineCore, channel: SyncChannel) -> None:
    """One turn of ``baton.engine.process.serve`` without commands."""
    channel.is_readable(0.0)
    core.admit()
    core.run()
    channel.send(core.report())


def microseconds(turn: Callable[[], None]) -> float:
    """The median over rounds of the mean CPU time of a turn."""
    means: list[float] = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(STEPS_PER_ROUND):
            turn()
        means.append((time.process_time() - started) / STEPS_PER_ROUND * 1e6)
    return statistics.median(means)


def main() -> None:
    options = argparse.ArgumentParser(prog="bench.engine_host", description=__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="sequences that decode")
    options.add_argument("--profile", action="store_true", help="print where the time of the last size goes")
    arguments = options.parse_args()
    for rows in arguments.rows:
        core = decoding(rows)
        with reader() as channel:
            print(f"{rows:4} rows  {microseconds(lambda: loop_turn(core, channel)):7.0f} us per step")  # noqa: B023
            if arguments.profile and rows == arguments.rows[-1]:
                _profile(core, channel)


def _profile(core: EngineCore, channel: SyncChannel) -> None:
    with cProfile.Profile() as profile:
        for _ in range(STEPS_PER_ROUND):
            loop_turn(core, channel)
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
