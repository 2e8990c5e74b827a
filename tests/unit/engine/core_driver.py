"""Drives an ``EngineCore``, over a ``FakeRunner`` or any other, without any process, thread or clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from baton.core.clock import ManualClock
from baton.core.errors import BatonError
from baton.core.types import EngineStats, FilledBlocks, FirstToken, StopRules, TokenChunk, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.drafter import Drafter
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.messages import (
    Admitted,
    Answered,
    BlocksRead,
    Command,
    Decode,
    Event,
    Failed,
    Filled,
    First,
    Import,
    Prefill,
    Read,
    ReadCached,
    Refused,
    Release,
    Reserve,
    Streamed,
    Write,
    Written,
)
from baton.engine.process import plain_drafter
from baton.engine.runner import Part, Runner

STEPS = 20_000  # no test needs as many: more means that the engine hangs


def request(prompt: Iterable[int], max_tokens: int = 8, **fields: object) -> TokenRequest:
    fields.setdefault("stop", StopRules(max_tokens=max_tokens, ignore_eos=True))
    return TokenRequest("r", tuple(prompt), **fields)  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Ids that differ between salts from the first one on."""
    return tuple(3 + (i * i + 31 * i + 97 * salt) % 500 for i in range(length))


@dataclass
class Outcome:
    """Everything that the engine said about one request."""

    cached_tokens: int | None = None
    chunks: list[TokenChunk] = field(default_factory=list)
    filled: list[FilledBlocks] = field(default_factory=list)
    first: FirstToken | None = None
    error: BatonError | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def is_over(self) -> bool:
        return self.error is not None or bool(self.chunks and self.chunks[-1].finish)


class CoreDriver:
    """Commands and steps of an engine over ``runner``, one after another; the blocks are counted at each step."""

    def __init__(self, runner: Runner, config: EngineConfig, drafter: Drafter | None = None) -> None:
        """``drafter``: by default the one that an engine without a draft model has."""
        self.clock = ManualClock()
        self.core = EngineCore(runner, plain_drafter(config) if drafter is None else drafter, config, self.clock)
        self.outcomes: dict[int, Outcome] = {}
        self.replies: dict[int, bytes | BatonError | None] = {}
        self._numbers = 0
        self._to_decode: dict[int, int] = {}  # key -> steps to wait after admission

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    def reserve(self, request: TokenRequest, compute_up_to: int = 0) -> int:
        return self._open(lambda key, asked: Reserve(key, asked, compute_up_to), request)

    def prefill(self, request: TokenRequest, compute_up_to: int = 1_000_000) -> int:
        return self._open(lambda key, asked: Prefill(key, asked, compute_up_to), request)

    def import_blocks(self, key: int, block_count: int) -> bytes | BatonError | None:
        """None: done."""
        op = self._next()
        self.core.handle(Import(key, op, block_count))
        self.step()
        return self.replies[op]

    def read_cached(self, *names: bytes) -> bytes | BatonError | None:
        op = self._next()
        self.core.handle(ReadCached(op, names))
        self.step()
        return self.replies[op]

    def decode(self, key: int, first: FirstToken | None = None) -> None:
        self.core.handle(Decode(key, first))

    def decode_when_admitted(self, key: int, *, after: int = 0) -> None:
        """Let the request compute for itself ``after`` steps after its admission."""
        self._to_decode[key] = after

    def release(self, key: int) -> None:
        self.core.handle(Release(key))

    def write(self, key: int, first_block: int, payload: bytes) -> bytes | BatonError | None:
        op = self._next()
        self.core.handle(Write(key, op, first_block, payload))
        self.step()
        return self.replies[op]

    def read(self, key: int, first_block: int, block_count: int) -> bytes | BatonError | None:
        op = self._next()
        self.core.handle(Read(key, op, first_block, block_count))
        self.step()
        return self.replies[op]

    def answer(self, request: TokenRequest) -> Outcome:
        """Admit, compute and finish one request."""
        key = self.reserve(request)
        self.step()
        self.decode(key)
        return self.finish(key)

    def finish(self, *keys: int) -> Outcome:
        """Step until all ``keys`` are over; returns the first one's outcome."""
        self.run_until(lambda: all(self.outcomes[key].is_over for key in keys))
        return self.outcomes[keys[0]]

    def first_token(self, key: int) -> FirstToken:
        self.run_until(lambda: self.outcomes[key].first is not None or self.outcomes[key].error is not None)
        first = self.outcomes[key].first
        assert first is not None, self.outcomes[key].error
        return first

    def run_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(STEPS):
            if condition():
                return
            assert self.core.has_work, f"the engine sleeps with work undone: {self.stats}"
            self.step()
        raise AssertionError("the engine does not come to an end")

    def step(self) -> None:
        report = self.core.step()
        for key, token_id in zip(report.drawn.keys, report.drawn.token_ids, strict=True):
            self._add_chunk(key, TokenChunk((token_id,)))
        for event in report.events:
            self._on_event(event)
        for key in [k for k in self._to_decode if self.outcomes[k].cached_tokens is not None]:
            self._to_decode[key] -= 1
            if self._to_decode[key] < 0:
                del self._to_decode[key]
                self.decode(key)
        stats = report.stats
        assert stats.free_blocks + stats.held_blocks + stats.cached_blocks == stats.total_blocks

    def assert_idle(self) -> None:
        """Nothing is held, queued or running."""
        self.step()
        stats = self.stats
        assert (stats.held_blocks, stats.waiting, stats.running, self.core.has_work) == (0, 0, 0, False)
        for tier in self.core._scheduler._shares.tiers:
            assert (tier.places, tier.blocks, tier.fixed_places, tier.fixed_blocks) == (0, 0, 0, 0)
            assert (tier.live, tier.waiting, tier.promised, tier.tenants) == (0, 0, 0, {})

    def _on_event(self, event: Event) -> None:
        match event:
            case Admitted(key, cached_tokens, _):
                assert self.outcomes[key].cached_tokens is None, "admitted twice"
                self.outcomes[key].cached_tokens = cached_tokens
            case Filled(key, blocks):
                self.outcomes[key].filled.append(blocks)
            case First(key, first):
                assert self.outcomes[key].first is None, "two first tokens"
                self.outcomes[key].first = first
            case Streamed(key, chunk):
                self._add_chunk(key, chunk)
            case Failed(key, error):
                self.outcomes[key].error = error
            case Written(op):
                self.replies[op] = None
            case BlocksRead(op, payload) | Answered(op, payload):
                self.replies[op] = payload
            case Refused(op, error):
                self.replies[op] = error

    def _add_chunk(self, key: int, chunk: TokenChunk) -> None:
        assert not self.outcomes[key].is_over, "a chunk after the last one"
        self.outcomes[key].chunks.append(chunk)

    def _open(self, command: Callable[[int, TokenRequest], Command], request: TokenRequest) -> int:
        key = self._next()
        self.outcomes[key] = Outcome()
        self.core.handle(command(key, request))
        return key

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers


class Driver(CoreDriver):
    """Over a fake runner."""

    steps_ahead: ClassVar[int] = 0  # of drivers that are not told otherwise; a test module may run under both

    def __init__(
        self,
        total_blocks: int = 64,
        *,
        block_size: int = 4,
        steps_ahead: int | None = None,
        on_step: Callable[[Sequence[Part]], None] | None = None,
        **config: object,
    ) -> None:
        card = fake_card(block_size=block_size)
        steps_ahead = self.steps_ahead if steps_ahead is None else steps_ahead
        self.runner = FakeRunner(card, total_blocks, steps_ahead=steps_ahead, on_step=on_step)
        super().__init__(self.runner, EngineConfig(**config))  # type: ignore[arg-type]
