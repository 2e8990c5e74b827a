"""Who runs in the next step, and who waits: continuous batching with chunked prefill. Pure, with an injected clock.

Order is by priority, then arrival, everywhere: in the waiting queue, for decode rows, for prefill chunks. The head of
the queue is never overtaken by a later one that happens to fit, so nobody starves. When blocks run out, the youngest
sequence of the lowest priority gives up its blocks, goes back to where its rank puts it in the queue (the front of its
priority) and is recomputed later; its tokens stay, so none is drawn or delivered twice.

Beside decode rows a step takes only as much of prompts as keeps it within ``engine.tpot_target_ms`` (``StepPace``).

While a step is in flight the blocks given up are not free before it has finished. Whoever needed them misses a step,
and until its next one nobody is admitted into what it waits for.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import NamedTuple

from baton.core.clock import Clock
from baton.core.errors import Overloaded
from baton.engine.blocks import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.pacing import StepPace
from baton.engine.runner import Part
from baton.engine.sequence import Sequence, Stage
from baton.engine.speculation import Speculator

DEPARTURES = 16  # recent ends of requests from which the time to the next free place is estimated
RETRY_SECONDS = (0.1, 10.0)  # bounds of what a refused caller is told to wait
DECODING = 2  # tokens at most that a sequence which decodes has to compute, the one in flight included


class _Launch(NamedTuple):
    at: float
    rows: int
    chunk_tokens: int


class Step(NamedTuple):
    """What is computed together: ``parts[i]`` is the share of ``sequences[i]``."""

    sequences: list[Sequence]
    parts: list[Part]
    preempted: list[Sequence]  # who lost its blocks for the others' sake
    chunked: list[Sequence]  # those whose part is more than one token

    def add(self, sequence: Sequence, count: int) -> None:
        """The sequence's next ``count`` tokens."""
        self.sequences.append(sequence)
        self.parts.append(sequence.launch(sequence.launched + count))
        if count > 1:
            self.chunked.append(sequence)

    def name_blocks(self) -> None:
        """Compute the names of blocks that the step fills; for a moment when the host has nothing better to do."""
        for sequence in self.chunked:
            sequence.name_blocks()


class Flight(NamedTuple):
    """A launched step whose results have not been collected."""

    number: int
    step: Step


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Scheduler:
    """Owns the order of all live sequences and gives them blocks of ``pool``."""

    def __init__(self, pool: BlockPool, config: EngineConfig, clock: Clock, speculator: Speculator) -> None:
        self._pool = pool
        self._speculator = speculator
        self._config = config
        self._clock = clock
        # A decode row for everyone who runs fits into a step, so nobody is ever left out of one.
        self._max_admitted = min(config.max_running, config.max_step_tokens)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._resting = 0  # admitted, but not part of steps: held or pinned
        self._arrivals = 0
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._owed = 0  # blocks that those who missed the last step wait for
        self._pace = StepPace(config.tpot_target_ms / 1000, config.max_step_tokens)
        self._launches: deque[_Launch] = deque()  # steps in flight
        self._landed_at = 0.0
        self._rows = 0  # of answers in the step planned last
        self._computing: list[Sequence] = []  # with a prompt to compute, as of the last step
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with blocks, in whatever stage."""
        return len(self._running) + self._resting

    @property
    def has_work(self) -> bool:
        """A step would compute or admit something."""
        return bool(self._running) or self._admissible() is not None

    @property
    def backlog_tokens(self) -> int:
        """Of prompts that run and are not computed; those in flight count."""
        return sum(s.length - s.computed for s in self._computing if s.stage is Stage.RUNNING)

    @property
    def prompt_tokens_per_second(self) -> float:
        """See ``StepPace``; beside the rows of the last step."""
        return self._pace.prompt_tokens_per_second(self._rows)

    @property
    def decode_step_seconds(self) -> float:
        return self._pace.row_seconds

    # --- the life of a sequence ---------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence, or raise Overloaded at once: the queue is bounded."""
        if len(self._waiting) >= self._config.max_waiting:
            raise Overloaded(
                f"engine queue is full: {len(self._waiting)} requests wait (max_waiting)",
                retry_after=self._retry_after(),
            )
        sequence.arrival = self._arrivals
        self._arrivals += 1
        insort(self._waiting, sequence, key=_rank)

    def admit(self) -> list[Sequence]:
        """Give blocks to waiting sequences, in order, until one does not fit. Returns the newly admitted.

        Nobody who waits has a row in flight: a step that preempts is launched just before the one before it is
        collected, and both come before the next admission.
        """
        admitted: list[Sequence] = []
        while (sequence := self._admissible()) is not None:
            allocation = self._pool.allocate(sequence.sharable_hashes(), self._blocks_wanted(sequence))
            if allocation is None:
                break
            self._waiting.pop(0)
            sequence.give_blocks(allocation)
            self._pool.keep(sequence.kept_hits)
            if not sequence.preemptions:
                sequence.stage = Stage.HELD
                self._resting += 1
            else:
                self._run(sequence)
            admitted.append(sequence)
        return admitted

    def start(self, sequence: Sequence) -> None:
        """A held sequence takes part in steps from now on."""
        self._resting -= 1
        self._run(sequence)

    def pin(self, sequence: Sequence) -> None:
        """A prefill is done: it leaves the steps and keeps its blocks until it is dropped."""
        self._running.remove(sequence)
        sequence.stage = Stage.PINNED
        self._resting += 1

    def drop(self, sequence: Sequence) -> None:
        """The sequence ends, in whatever stage; its blocks return to the pool."""
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is Stage.RUNNING:
            self._running.remove(sequence)
        else:
            self._resting -= 1
        sequence.stage = Stage.ENDED
        self._pool.release(sequence.take_blocks())
        self._departures.append(self._clock.now())

    def expired(self) -> list[Sequence]:
        """Waiting and running sequences whose deadline has passed."""
        now = self._clock.now()
        return [s for s in (*self._waiting, *self._running) if s.deadline is not None and s.deadline <= now]

    def next_deadline(self) -> float | None:
        """The earliest deadline in the queue, when the engine has to look at it again."""
        return min((s.deadline for s in self._waiting if s.deadline is not None), default=None)

    # --- a step -------------------------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step: a row for everyone who decodes, then prefill chunks into what is left, then drafts.

        At most ``max_step_tokens`` tokens in all, which count as launched from now on; ``landed`` follows for each step
        that has any. A victim of preemption stands behind the one that needs its blocks, or is it, so whoever has a
        part already keeps it.
        """
        step = Step([], [], [], [])
        unfinished: list[Sequence] = []
        self._owed = self._rows = 0
        self._computing.clear()
        for sequence in tuple(self._running):
            pending = sequence.length - sequence.launched
            if sequence.length - sequence.computed > DECODING:
                self._computing.append(sequence)
            if pending == 1:
                if sequence.launched < sequence.capacity or self._make_room(sequence, step.preempted):
                    step.add(sequence, 1)
                    self._rows += not sequence.is_prefill
            elif pending:
                unfinished.append(sequence)
        budget = self._config.max_step_tokens - len(step.parts)
        chunks = self._add_chunks(step, unfinished, min(budget, self._pace.chunk_tokens(self._rows)))
        if step.parts:
            self._launches.append(_Launch(self._clock.now(), self._rows, chunks))
        budget -= chunks
        for index, part in self._speculator.draft(step.sequences, step.parts, budget, self._room_for_drafts):
            step.parts[index] = part
        return step

    def landed(self) -> None:
        """The oldest planned step has been computed. It took the time since it was launched, or since the one before it
        landed."""
        launch, now = self._launches.popleft(), self._clock.now()
        self._pace.learn(launch.rows, launch.chunk_tokens, now - max(launch.at, self._landed_at))
        self._landed_at = now

    def waits(self) -> bool:
        """Whether the next step is worth planning only when the tokens in flight are known."""
        return self._speculator.waits(self._running)

    def _add_chunks(self, step: Step, unfinished: list[Sequence], budget: int) -> int:
        """Returns how many of ``budget`` tokens they take."""
        left = budget
        for sequence in unfinished:
            if not left:
                break
            if sequence.stage is Stage.RUNNING:
                chunk = min(sequence.length - sequence.launched, left, sequence.max_chunk)
                step.add(sequence, chunk)
                left -= chunk
        return budget - left

    def _room_for_drafts(self, sequence: Sequence, count: int) -> int:
        """For how many of ``count`` drafts there is room. A block that another one may soon need is not taken."""
        while sequence.capacity < sequence.launched + count and self._pool.available > len(self._running) + self._owed:
            block = self._pool.grow()
            assert block is not None
            sequence.add_block(block)
        return min(count, sequence.capacity - sequence.launched)

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """A block for the sequence's next token, at the cost of others if need be.

        False: there is none for this step, because it was preempted itself or the block is still in use.
        """
        while sequence.stage is Stage.RUNNING:
            block = self._pool.grow()
            if block is not None:
                sequence.add_block(block)
                return True
            if self._owed < self._pool.fenced:
                self._owed += 1
                return False
            victim = next(s for s in reversed(self._running) if s.is_preemptible)
            self._preempt(victim)
            preempted.append(victim)
        return False

    def _preempt(self, victim: Sequence) -> None:
        self._running.remove(victim)
        self._pool.release(victim.take_blocks())
        victim.stage = Stage.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, victim, key=_rank)

    def _run(self, sequence: Sequence) -> None:
        sequence.stage = Stage.RUNNING
        insort(self._running, sequence, key=_rank)
        self._computing.append(sequence)

    def _admissible(self) -> Sequence | None:
        """The head of the queue if it may be admitted now."""
        if not self._waiting or self.running >= self._max_admitted:
            return None
        head = self._waiting[0]
        fits = self._pool.can_allocate(head.sharable_hashes(), self._blocks_wanted(head) + self._owed)
        return head if fits else None

    def _blocks_wanted(self, sequence: Sequence) -> int:
        return sequence.blocks_wanted(self._config.growth_window)

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is free, from how fast requests have been leaving."""
        low, high = RETRY_SECONDS
        if len(self._departures) < 2:
            return 1.0
        span = self._clock.now() - self._departures[0]
        return min(max(span / (len(self._departures) - 1), low), high)
