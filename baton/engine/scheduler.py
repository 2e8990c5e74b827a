"""Who runs in the next step, and who waits: continuous batching with chunked prefill. Pure, with an injected clock.

Who is admitted next is decided by ``waiting.py``, whose prompts a step computes first by ``prompt_order.py``; both go
by what tenants and tiers have had (``shares.py``). When blocks run out, a sequence of the lowest tier that can gives up
its blocks (``victims.py``), waits again and is recomputed later; its tokens stay, so none is drawn or delivered twice.
So nobody loses its blocks to a lower tier. Whoever is next also takes them from lower tiers that have more than is
reserved for them (``reclaim.py``).

Beside decode rows a step takes only as much of prompts as keeps it within ``engine.tpot_target_ms`` (``StepPace``).

While a step is in flight the blocks given up are not free before it has finished. Whoever needed them misses a step,
and until its next one nobody is admitted into what it waits for.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable

from baton.core.clock import Clock
from baton.core.errors import Expired, Overloaded
from baton.core.types import Tier, TierLoad
from baton.engine.blocks import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.pacing import StepPace
from baton.engine.prompt_order import PromptOrder, tenants
from baton.engine.reclaim import borrowers
from baton.engine.sequence import Sequence, Stage
from baton.engine.shares import FairShares
from baton.engine.speculation import Speculator
from baton.engine.step import Admission, Step
from baton.engine.victims import giving_order
from baton.engine.waiting import WaitingQueue, rank

DEPARTURES = 16  # recent ends of requests from which the time to the next free place is estimated
RETRY_SECONDS = (0.1, 10.0)  # bounds of what a refused caller is told to wait
DECODING = 2  # tokens at most that a sequence which decodes has to compute, the one in flight included


class Scheduler:
    """Owns the order of all live sequences and gives them blocks of ``pool``."""

    def __init__(self, pool: BlockPool, config: EngineConfig, clock: Clock, speculator: Speculator) -> None:
        self._pool = pool
        self._speculator = speculator
        self._config = config
        self._clock = clock
        # A decode row for everyone who runs fits into a step, so nobody is ever left out of one.
        self._max_admitted = min(config.max_running, config.max_step_tokens)
        self._shares = FairShares(config, pool.total, self._max_admitted)
        self._waiting = WaitingQueue(self._shares, self._blocks_wanted, self._new_blocks, self._fits, self._settle)
        self._order = PromptOrder(self._shares, config.max_step_tokens)
        self._running: list[Sequence] = []
        self._resting = 0  # admitted, but not part of steps: held or pinned
        self._arrivals = 0
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._owed = 0  # blocks that those who missed the last step wait for
        self._pace = StepPace(config.tpot_target_ms / 1000, config.max_step_tokens)
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
    def tier_loads(self) -> tuple[TierLoad, ...]:
        """Their backlogs are of prompts that run and are not computed; what is in flight counts."""
        backlog: Counter[Tier] = Counter()
        for sequence in self._computing:
            if sequence.stage is Stage.RUNNING:
                backlog[sequence.request.tier] += sequence.length - sequence.computed
        return self._shares.loads(backlog)

    @property
    def has_work(self) -> bool:
        """A step would compute or admit something."""
        return bool(self._running) or self._admissible() is not None

    @property
    def prompt_tokens_per_second(self) -> float:
        """See ``StepPace``; beside the rows of the last step."""
        return self._pace.prompt_tokens_per_second(self._rows)

    @property
    def decode_step_seconds(self) -> float:
        return self._pace.row_seconds

    # --- the life of a sequence ---------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> Sequence | None:
        """Queue a new sequence. The queue is bounded: with it full either somebody gives way, who is returned and must
        be dropped, or Overloaded is raised at once."""
        now = self._clock.now()
        self._shares.join(sequence)
        gives_way = None
        if len(self._waiting) >= self._config.max_waiting:
            gives_way = self._waiting.gives_way(sequence)
            if gives_way is None:
                reason = self._waiting.reason(sequence)
                self._shares.leave(sequence, now)
                raise self.overloaded(f"; {reason}" if reason else "")
        sequence.arrival = self._arrivals
        self._arrivals += 1
        sequence.submitted_at = now
        self._waiting.add(sequence, now)
        return gives_way

    def overloaded(self, reason: str = "; its place goes to a request with a better claim to it") -> Overloaded:
        """What somebody is told who has no place in the queue, or has to give it away."""
        return Overloaded(
            f"engine queue is full: {len(self._waiting)} requests wait (max_waiting){reason}",
            retry_after=self._retry_after(),
        )

    def admit(self) -> Admission:
        """Give blocks to waiting sequences, in order, until one does not fit.

        Nobody who may be admitted has a row in flight. A step that preempts is launched just before the one before it
        is collected, and both come before the next admission; who is preempted here waits until then.
        """
        now = self._clock.now()
        admission = Admission([], [])
        while (sequence := self._waiting.next(now)) is not None:
            if not self._fits(sequence) and not self._reclaim(sequence, admission.preempted):
                break
            allocation = self._pool.allocate(sequence.sharable_hashes(), self._blocks_wanted(sequence))
            if allocation is None:
                break
            self._waiting.take(sequence, now)
            sequence.give_blocks(allocation)
            self._pool.keep(sequence.kept_hits)
            is_held = not sequence.preemptions
            self._shares.admit(sequence, is_fixed=is_held or sequence.is_prefill)
            if is_held:
                sequence.stage = Stage.HELD
                self._resting += 1
            else:
                self._run(sequence)
            admission.admitted.append(sequence)
        for victim in admission.preempted:
            self._waiting.add(victim, now)
        return admission

    def start(self, sequence: Sequence) -> None:
        """A held sequence takes part in steps from now on."""
        self._resting -= 1
        if not sequence.is_prefill:
            self._shares.unfix(sequence)
        self._settle((sequence,))
        self._run(sequence)
        self._waiting.changed()

    def pin(self, sequence: Sequence) -> None:
        """A prefill is done: it leaves the steps and keeps its blocks until it is dropped."""
        self._running.remove(sequence)
        sequence.stage = Stage.PINNED
        self._resting += 1

    def drop(self, sequence: Sequence) -> None:
        """The sequence ends, in whatever stage; its blocks return to the pool."""
        now = self._clock.now()
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
            self._settle((sequence,))
        else:
            self._shares.give_back(sequence)
            if sequence.stage is Stage.RUNNING:
                self._running.remove(sequence)
            else:
                self._resting -= 1
        sequence.stage = Stage.ENDED
        self._pool.release(sequence.take_blocks())
        self._shares.leave(sequence, now)
        self._waiting.changed()
        self._departures.append(now)

    def expired(self) -> list[tuple[Sequence, Expired]]:
        """Waiting and running sequences whose deadline has passed, and what to tell them."""
        now = self._clock.now()
        late = [s for s in (*self._waiting, *self._running) if s.deadline is not None and s.deadline <= now]
        return [(sequence, self._expiry(sequence)) for sequence in late]

    def _expiry(self, sequence: Sequence) -> Expired:
        reason = self._waiting.reason(sequence) if sequence.stage is Stage.WAITING else ""
        return Expired(
            "the request's deadline passed in the engine" + (f" while it waited; {reason}" if reason else "")
        )

    def next_deadline(self) -> float | None:
        """When the engine has to look at the queue again: for a deadline, or for who has waited too long."""
        times = [s.deadline for s in self._waiting if s.deadline is not None]
        if self._waiting.due_at < math.inf:
            times.append(self._waiting.due_at)
        return min(times, default=None)

    # --- a step -------------------------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step: a row for everyone who decodes, then prefill chunks into what is left, then drafts.

        At most ``max_step_tokens`` tokens in all, which count as launched from now on; ``landed`` follows for each step
        that has any. Nobody has a part before it is known who is preempted.
        """
        step = Step([], [], [], [])
        rows: list[Sequence] = []
        unfinished: list[Sequence] = []
        self._owed = self._rows = 0
        self._computing.clear()
        for sequence in tuple(self._running):
            pending = sequence.length - sequence.launched
            if sequence.length - sequence.computed > DECODING:
                self._computing.append(sequence)
            if pending == 1:
                if sequence.launched < sequence.capacity or self._make_room(sequence, step.preempted):
                    rows.append(sequence)
            elif pending:
                unfinished.append(sequence)
        for sequence in rows:
            if sequence.stage is Stage.RUNNING:
                step.add(sequence, 1)
                self._rows += not sequence.is_prefill
        budget = self._config.max_step_tokens - len(step.parts)
        chunks = self._add_chunks(step, unfinished, min(budget, self._pace.chunk_tokens(self._rows)))
        if step.parts:
            self._pace.launched(self._rows, chunks, self._clock.now())
        budget -= chunks
        for index, part in self._speculator.draft(step.sequences, step.parts, budget, self._room_for_drafts):
            step.parts[index] = part
        return step

    def landed(self) -> None:
        """The oldest planned step has been computed."""
        self._pace.landed(self._clock.now())

    def waits(self) -> bool:
        """Whether the next step is worth planning only when the tokens in flight are known."""
        return self._speculator.waits(self._running)

    def _add_chunks(self, step: Step, unfinished: list[Sequence], budget: int) -> int:
        """Returns how many of ``budget`` tokens they take."""
        self._order.passed(budget)
        now = self._clock.now() if len(unfinished) > 1 and budget and self._compete(unfinished, budget) else None
        if now is not None:
            self._settle(self._running)
            unfinished = self._order.sort(unfinished, budget, now)
        left = budget
        for sequence in unfinished:
            if not left:
                break
            if sequence.stage is Stage.RUNNING:
                chunk = min(sequence.length - sequence.launched, left, sequence.max_chunk)
                step.add(sequence, chunk)
                left -= chunk
                self._settle((sequence,))
                if now is not None:
                    self._order.used(sequence, chunk, now)
        return budget - left

    def _compete(self, unfinished: list[Sequence], budget: int) -> bool:
        """Tenants want more of a step than there is."""
        wanted = sum(min(s.length - s.launched, s.max_chunk) for s in unfinished)
        return wanted > budget and tenants(unfinished) > 1

    def _room_for_drafts(self, sequence: Sequence, count: int) -> int:
        """For how many of ``count`` drafts there is room. A block that another one may soon need is not taken."""
        while sequence.capacity < sequence.launched + count and self._pool.available > len(self._running) + self._owed:
            if sequence.share.is_capped(1):
                break
            block = self._pool.grow()
            assert block is not None
            self._add_block(sequence, block)
        return min(count, sequence.capacity - sequence.launched)

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """A block for the sequence's next token, at the cost of others if need be.

        False: there is none for this step, because it was preempted itself or the block is still in use.
        """
        while sequence.stage is Stage.RUNNING:
            victim = self._own_victim(sequence)
            block = self._pool.grow() if victim is None else None
            if block is not None:
                self._add_block(sequence, block)
                return True
            if victim is None and self._owed < self._pool.fenced:
                self._owed += 1
                return False
            victim = victim or self._victim()
            self._preempt(victim)
            preempted.append(victim)
            self._waiting.add(victim, self._clock.now())
        return False

    def _own_victim(self, sequence: Sequence) -> Sequence | None:
        """Who gives up its blocks because the tenant holds all that it may; nobody if no other of it runs."""
        if not sequence.share.is_capped(1):
            return None
        own = [s for s in self._running if s.share is sequence.share and s.is_preemptible]
        return own[-1] if len(own) > 1 else None

    def _victim(self) -> Sequence:
        """Of the lowest tier that runs something which can be preempted."""
        able = [s for s in self._running if s.is_preemptible]
        tier = able[-1].share.tier
        return next(giving_order(s for s in able if s.share.tier is tier))

    def _reclaim(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Have lower tiers give back what they borrowed, if that is enough. Says whether the sequence fits now: while a
        step in flight may touch the blocks it does not yet."""
        if not self._shares.borrowing_below(sequence.share.tier):
            return False
        wanted = self._blocks_wanted(sequence)
        places = self.running + 1 - self._max_admitted
        short = self._pool.shortage(sequence.sharable_hashes(), wanted + self._owed) - self._pool.fenced
        has_claim = self._shares.has_claim(sequence.share.tier, wanted)
        victims = borrowers(
            sequence, self._running, self._shares, self._pool, has_claim=has_claim, places=places, blocks=short
        )
        for victim in victims:
            self._preempt(victim)
        preempted += victims
        return bool(victims) and self._fits(sequence)

    def _preempt(self, victim: Sequence) -> None:
        """The victim holds nothing from now on; it has to be queued again."""
        self._running.remove(victim)
        self._shares.give_back(victim)
        self._pool.release(victim.take_blocks())
        victim.stage = Stage.WAITING
        victim.preemptions += 1
        victim.share.tier.preemptions += 1
        self.preemptions += 1

    def _run(self, sequence: Sequence) -> None:
        sequence.stage = Stage.RUNNING
        insort(self._running, sequence, key=rank)
        self._computing.append(sequence)

    def _settle(self, sequences: Iterable[Sequence] | None = None) -> None:
        self._shares.settle(self._running if sequences is None else sequences)

    def _add_block(self, sequence: Sequence, block: int) -> None:
        sequence.add_block(block)
        self._shares.grow(sequence, block)

    def _admissible(self) -> Sequence | None:
        """Who is next, if it may be admitted now."""
        sequence = self._waiting.next(self._clock.now()) if self._waiting else None
        return sequence if sequence is not None and self._fits(sequence) else None

    def _fits(self, sequence: Sequence) -> bool:
        if self.running >= self._max_admitted:
            return False
        return self._pool.can_allocate(sequence.sharable_hashes(), self._blocks_wanted(sequence) + self._owed)

    def _new_blocks(self, sequence: Sequence) -> int:
        """Blocks that its tenant would hold more if it were admitted."""
        held = sequence.share.blocks
        found = self._pool.found(sequence.sharable_hashes())
        return self._blocks_wanted(sequence) - sum(block in held for block in found)

    def _blocks_wanted(self, sequence: Sequence) -> int:
        return sequence.blocks_wanted(self._config.growth_window)

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is free, from how fast requests have been leaving."""
        low, high = RETRY_SECONDS
        if len(self._departures) < 2:
            return 1.0
        span = self._clock.now() - self._departures[0]
        return min(max(span / (len(self._departures) - 1), low), high)
