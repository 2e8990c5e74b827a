"""Drafts by a small model of the same vocabulary: a runner and a pool of its own, used between the engine's steps.

It keeps the KV of what it has seen. Drafts that turned out wrong are rows to be computed again, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import ConfigError
from baton.core.types import ModelCard, Sampling
from baton.engine.blocks import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.drafter import Query
from baton.engine.runner import Draw, Part, Runner

GREEDY = Draw(Sampling(), 0)


@dataclass(slots=True)
class Reading:
    """How far the model has read one context: the KV of ``tokens`` is in ``blocks``."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def rewind(self, context: Sequence[int]) -> None:
        """Keep what agrees with ``context``, and at least its last token to be computed."""
        agreed = min(len(self.tokens), len(context) - 1)
        while agreed and self.tokens[agreed - 1] != context[agreed - 1]:
            agreed -= 1
        del self.tokens[agreed:]


@dataclass(slots=True)
class Line:
    """One query at work: ``context`` with its drafts, which are the tokens past ``length``."""

    key: int
    reading: Reading
    context: list[int]
    length: int
    wanted: int  # length of context and drafts together

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(self.context[self.length :])

    @property
    def is_done(self) -> bool:
        return len(self.context) >= self.wanted


class ModelDrafter:
    """Satisfies ``Drafter``: greedy drafts, those of all queries computed together.

    A long context is read in pieces, one a call, so that no step waits for more than a step of the small model. A
    query has no drafts before its context has been read, or when the pool has no room for it.
    """

    worth = 1.0

    def __init__(self, runner: Runner, card: ModelCard, config: EngineConfig) -> None:
        """``card`` is the model's whose answers are drafted. The caller closes ``runner``. Raises ConfigError when the
        vocabularies differ."""
        if runner.card.vocab_size != card.vocab_size:
            raise ConfigError(
                f"engine.draft_model: must have the vocabulary of the model, {card.vocab_size} tokens, "
                f"got {runner.card.vocab_size}"
            )
        self._runner = runner
        self._block_size = runner.card.format.block_size
        self._most_tokens = config.max_step_tokens
        self._most_rows = min(config.speculation_max_rows, config.max_step_tokens)
        self._pool = BlockPool(runner.total_blocks)
        self._readings: dict[int, Reading] = {}

    def expects(self, key: int, context: Sequence[int]) -> bool:
        return len(context) < self._runner.card.context_length

    def propose(self, asked: Sequence[Query]) -> list[tuple[int, ...]]:
        """See ``Drafter.propose``."""
        lines = [self._open(query) for query in asked[: self._most_rows]]
        working = [line for line in lines if self._make_room(line)]
        while working:
            working = self._step(working)
        return [*(line.drafts for line in lines), *[()] * (len(asked) - len(lines))]

    def forget(self, key: int) -> None:
        reading = self._readings.pop(key, None)
        if reading is not None:
            self._pool.release(reading.blocks)
            self._runner.forget(key)

    def _open(self, query: Query) -> Line:
        reading = self._readings.setdefault(query.key, Reading())
        reading.rewind(query.context)
        self._runner.forget(query.key)  # what it drew last may not be what the context went on with
        length = len(query.context)
        wanted = min(length + query.limit, self._runner.card.context_length)
        return Line(query.key, reading, list(query.context), length, wanted)

    def _make_room(self, line: Line) -> bool:
        """Blocks for everything but the last draft, whose KV nobody needs."""
        blocks = line.reading.blocks
        missing = -(-(line.wanted - 1) // self._block_size) - len(blocks)
        if line.is_done or missing > self._pool.available:
            return False
        if missing > 0:
            allocation = self._pool.allocate((), missing)
            assert allocation is not None
            blocks += allocation.blocks
        return True

    def _step(self, lines: Sequence[Line]) -> list[Line]:
        """One step of the model for all ``lines``; returns those that go on."""
        share = max(1, self._most_tokens // len(lines))
        parts = [self._part(line, share) for line in lines]
        self._runner.launch(parts)
        result = self._runner.collect()
        working: list[Line] = []
        for line, part, token_id in zip(lines, parts, result.token_ids, strict=True):
            line.reading.tokens += line.context[part.start : part.end]
            if token_id is None:
                continue  # the rest of its context is read by later calls, or the model cannot draw
            line.context.append(token_id)
            if not line.is_done:
                working.append(line)
        return working

    def _part(self, line: Line, share: int) -> Part:
        start, end = len(line.reading.tokens), len(line.context)
        if end - start > share:
            return Part(line.key, line.context, start, start + share, line.reading.blocks)
        return Part(line.key, line.context, start, end, line.reading.blocks, GREEDY)
