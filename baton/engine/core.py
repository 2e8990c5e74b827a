"""The engine without its process: commands in, steps of the runner, reports out. Synchronous and deterministic.

With a runner that takes a step ahead, a step is planned and launched before the tokens of the one before it are known.
What lengths decide is decided by count: limits, blocks, where a draw may not end. An end that a token brings is seen
one step late: the sequence has a row in the step then in flight, of which nothing is kept. Drafts (``speculation``) do
need the tokens: a step that has them is planned when the one before it has been collected.

One request's failure is its own (``PartDetail.error``). An exception out of the runner is a bug: it passes through, the
process ends, and the front answers every request with PeerUnavailable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Blocks

from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest, TransferRejected
from baton.core.types import EngineStats, FinishReason, FirstToken, TokenChunk, TokenLogprob, TokenRequest
from baton.engine.block_access import BlockAccess
from baton.engine.blocks import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.drafter import Drafter
from baton.engine.limits import EngineLimits
from baton.engine.messages import (
    Admitted,
    BlockReport,
    Command,
    Decode,
    Drawn,
    Event,
    Failed,
    Filled,
    First,
    Import,
    Prefill,
    Release,
    Reserve,
    StepReport,
    Streamed,
)
from baton.engine.runner import DrawnToken, Part, PartDetail, Runner
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence, Stage, Work
from baton.engine.speculation import Speculator
from baton.engine.step import Flight

NO_DETAIL = PartDetail()


class EngineCore:
    """Both kinds of work in one batch: answers (Reserve, then Decode) and prefills."""

    def __init__(self, runner: Runner, drafter: Drafter, config: EngineConfig, clock: Clock) -> None:
        self._runner = runner
        self._card = runner.card
        self._clock = clock
        self._limits = EngineLimits(runner.card, runner.total_blocks)
        self._pool = BlockPool(runner.total_blocks, int(config.cache_keep_share * runner.total_blocks))
        self._speculator = Speculator(drafter, config)
        self._scheduler = Scheduler(self._pool, config, clock, self._speculator)
        self._live: dict[int, Sequence] = {}
        self.access = BlockAccess(runner, self._pool, self._live.get, clock)
        self._flights: deque[Flight] = deque()
        self._unnamed: list[Sequence] = []  # with imported contexts, whose blocks get names once a step is under way
        self._drawn_keys: list[int] = []
        self._drawn_tokens: list[int] = []
        self._events: list[Event] = []
        self._busy_seconds = self._host_seconds = 0.0
        self._steps = self._prompt_computed = self._prompt_cached = self._generated = 0

    @property
    def has_work(self) -> bool:
        """A step would compute, admit or report something; without it only a command or a deadline can."""
        return bool(self._events or self._flights) or self._scheduler.has_work

    @property
    def in_flight(self) -> bool:
        """A step has been launched whose results have not been collected."""
        return bool(self._flights)

    @property
    def has_news(self) -> bool:
        """The next report would tell a request something."""
        return bool(self._events or self._drawn_keys)

    @property
    def stats(self) -> EngineStats:
        times, tiers = self._runner.times, self._scheduler.tier_loads
        return EngineStats(
            total_blocks=self._pool.total,
            free_blocks=self._pool.free,
            held_blocks=self._pool.held,
            cached_blocks=self._pool.cached,
            kept_blocks=self._pool.kept,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            backlog_tokens=sum(load.backlog_tokens for load in tiers),
            prompt_tokens_per_second=self._scheduler.prompt_tokens_per_second,
            decode_step_seconds=self._scheduler.decode_step_seconds,
            steps=self._steps,
            prompt_tokens_computed=self._prompt_computed,
            prompt_tokens_cached=self._prompt_cached,
            tokens_generated=self._generated,
            preemptions=self._scheduler.preemptions,
            tiers=tiers,
            host_seconds=self._host_seconds,
            device_seconds=times.device,
            device_idle_seconds=times.device_idle,
            energy_joules=times.joules,
            draft_tokens_proposed=self._speculator.proposed,
            draft_tokens_accepted=self._speculator.accepted,
        )

    def idle_seconds(self) -> float | None:
        """How long the engine may sleep without a command: until a waiting request expires; None: for ever."""
        deadline = self._scheduler.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock.now())

    def add_busy(self, seconds: float) -> None:
        """The loop that drives the engine was awake for so long; what of it went on waiting, the runner knows.

        It knows so before this is called, so the difference is taken here only: between two calls it may shrink.
        """
        self._busy_seconds += seconds
        self._host_seconds = max(self._host_seconds, self._busy_seconds - self._runner.times.waited)

    def look(self) -> None:
        """Take in which copies beside the steps have ended, and whether a step's blocks can be handed over before its
        results are there. May be called while a step is waited for."""
        self._events += self.access.look()
        if self._flights and self._flights[0].is_to_be_told and self._runner.has_filled():
            for sequence, computed in self._flights[0].tell():
                self._announce(sequence, computed)

    def step(self) -> StepReport:
        """Admit, run one step if there is anything to run, and report it with all that commands brought about."""
        self.admit()
        self.run()
        return self.report()

    def admit(self) -> None:
        """End what has expired and give blocks to those who wait for them."""
        for sequence, error in self._scheduler.expired():
            self._fail(sequence, error)
        admitted, preempted = self._scheduler.admit()
        for sequence in preempted:
            self._runner.forget(sequence.key)
        for sequence in admitted:
            self._on_admitted(sequence)

    def run(self) -> bool:
        """Launch the next step, then take in the results of the oldest one that the runner need not overlap with it.

        False: there was nothing to launch, and nothing in flight.
        """
        has_waited = bool(self._flights) and self._scheduler.waits()
        if has_waited:
            self._collect()
        is_launched = self._launch()
        if not self._flights:
            return has_waited
        if not is_launched or len(self._flights) > self._runner.steps_ahead:
            self._collect()
        return True

    def report(self) -> StepReport:
        """What has happened since the last report."""
        drawn = Drawn(tuple(self._drawn_keys), tuple(self._drawn_tokens))
        report = StepReport(drawn, tuple(self._events), self.stats, self._pool.take_change())
        self._drawn_keys, self._drawn_tokens, self._events = [], [], []
        return report

    def news(self) -> StepReport | BlockReport:
        """The same, in short where it is of blocks alone: to tell of all else takes longer than to copy them."""
        short = None if self._drawn_keys else BlockReport.of(self._events)
        if short is None:
            return self.report()
        self._events.clear()
        return short

    # --- commands -----------------------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Take one command in; its consequences are in the next report. Never raises for a request's sake."""
        match command:
            case Reserve(key, request, compute_up_to):
                self._submit(key, Work.DECODE, request, compute_up_to)
            case Prefill(key, request, compute_up_to):
                self._submit(key, Work.PREFILL, request, compute_up_to)
            case Decode(key, first):
                self._start(key, first)
            case Import():
                self._import(command)
            case Release(key):
                sequence = self._live.pop(key, None)
                if sequence is not None:
                    self._drop(sequence)
            case _:
                self._events += self.access.handle(command)

    def _submit(self, key: int, work: Work, request: TokenRequest, compute_up_to: int) -> None:
        try:
            self._limits.check(request)
            deadline = None if request.timeout is None else self._clock.now() + request.timeout
            sequence = Sequence(key, work, request, self._card, deadline=deadline, compute_up_to=compute_up_to)
            gives_way = self._scheduler.submit(sequence)
        except BatonError as error:
            self._events.append(Failed(key, error))
            return
        self._live[key] = sequence
        if gives_way is not None:
            self._fail(gives_way, self._scheduler.overloaded())

    def _start(self, key: int, first: FirstToken | None) -> None:
        sequence = self._live.get(key)
        if sequence is None:
            return  # it has failed already, and said so
        self.access.fence(key)  # a hand-over that was given up may still be copying
        if sequence.stage is not Stage.HELD:
            self._fail(sequence, InvalidRequest(f"decode: the request is {sequence.stage}, not held", field="decode"))
            return
        if first is None:
            self._scheduler.start(sequence)
            return
        if not 0 <= first.token_id < self._card.vocab_size:
            self._fail(sequence, TransferRejected(f"first token {first.token_id} is not in the vocabulary"))
            return
        self.access.filled(sequence.blocks[sequence.hits : sequence.context_blocks()])
        finish = sequence.import_context(first)
        if finish is None:
            self._scheduler.start(sequence)
            self._unnamed.append(sequence)
        else:
            self._tell(sequence, TokenChunk(finish=finish, usage=sequence.usage()))

    def _import(self, command: Import) -> None:
        sequence = self._live.get(command.key)
        before = 0 if sequence is None else sequence.usage().cached_tokens
        self._events += self.access.handle(command)
        if sequence is not None:
            self._prompt_cached += sequence.usage().cached_tokens - before
            self._announce(sequence, sequence.computed)

    # --- a step -------------------------------------------------------------------------------------------------------

    def _on_admitted(self, sequence: Sequence) -> None:
        if sequence.preemptions:
            return  # its front knows nothing of the interruption
        self._prompt_cached += sequence.usage().cached_tokens
        starts_itself = sequence.starts_itself
        is_front_let_in = sequence.is_prefill or (self._runner.memory is not None and not starts_itself)
        blocks = tuple(sequence.blocks[: sequence.context_blocks()]) if is_front_let_in else ()
        self._events.append(Admitted(sequence.key, sequence.computed, starts_itself, blocks))
        if starts_itself:
            self._scheduler.start(sequence)
        self._announce(sequence, sequence.computed)

    def _launch(self) -> bool:
        step = self._scheduler.plan()
        for sequence in step.preempted:
            self._runner.forget(sequence.key)
        if not step.parts:
            return False
        self._steps += 1
        self._pool.launch(self._steps)
        self._runner.launch(step.parts)
        self._flights.append(Flight(self._steps, step))
        step.name_blocks()  # while the device computes, as what follows: a long context takes more than a millisecond
        for sequence in self._unnamed:
            sequence.name_blocks()  # to be found once the step has shown that nothing in them is wrong
        self._unnamed.clear()
        return True

    def _collect(self) -> None:
        result = self._runner.collect()
        flight = self._flights.popleft()
        step = flight.step
        self._pool.finish(flight.number)
        self._scheduler.landed()
        details, ended, waiting = result.details, Stage.ENDED, Stage.WAITING
        rows = zip(step.sequences, step.parts, result.token_ids, strict=True)
        for index, (sequence, part, token_id) in enumerate(rows):
            detail = details.get(index, NO_DETAIL)
            if part.start < sequence.prompt_length and detail.error is None:
                self._prompt_computed += min(part.end, sequence.prompt_length) - part.start
            if sequence.stage is waiting:
                self._apply_to_preempted(sequence, part, token_id, detail)
            elif sequence.stage is not ended:
                self._apply(sequence, part, token_id, detail)

    def _apply(self, sequence: Sequence, part: Part, token_id: int | None, detail: PartDetail) -> None:
        if detail.error is not None:
            self._pool.withdraw(sequence.blocks)  # what stands in them is in doubt
            self._fail(sequence, detail.error)
            return
        self._advance(sequence, part.end)
        if sequence.is_prefill:  # asked here, too: there are many rows of answers
            self._announce(sequence, part.end)
        if detail.prompt_logprobs:
            sequence.prompt_logprobs += detail.prompt_logprobs
        if token_id is not None:
            self._on_drawn(sequence, token_id, detail)
        elif detail.drawn:
            self._on_verified(sequence, part, detail.drawn)

    def _apply_to_preempted(self, sequence: Sequence, part: Part, token_id: int | None, detail: PartDetail) -> None:
        """A row was in flight when its sequence lost its blocks: of all it computed only the token is left.

        An error is not the sequence's end: its context is recomputed, and what still fails then fails it.
        """
        if detail.drawn:
            self._on_verified(sequence, part, detail.drawn)
        elif token_id is None:
            sequence.lose_draw()
        else:
            sequence.prompt_logprobs += detail.prompt_logprobs
            self._on_drawn(sequence, token_id, detail)

    def _advance(self, sequence: Sequence, end: int) -> None:
        for block, name, cache_class in sequence.advance(end):
            self._pool.publish(block, name, cache_class)

    def _announce(self, sequence: Sequence, computed: int) -> None:
        """Report the blocks that have become final, if it is a prefill."""
        filled = sequence.take_filled(computed)
        if filled is not None:
            self._events.append(Filled(sequence.key, filled, is_last=filled.tokens == len(sequence.context)))

    def _on_drawn(self, sequence: Sequence, token_id: int, detail: PartDetail) -> None:
        self._generated += 1
        is_first = not sequence.delivered
        finish = sequence.accept(token_id)
        logprob = detail.logprob
        if not is_first and finish is None and logprob is None:
            self._drawn_keys.append(sequence.key)
            self._drawn_tokens.append(token_id)
            return
        has_logprobs = is_first and sequence.request.prompt_logprobs is not None
        prompt_logprobs = tuple(sequence.prompt_logprobs) if has_logprobs else ()
        if sequence.is_prefill:
            first = FirstToken(token_id, sequence.usage(), logprob, prompt_logprobs, finish)
            self._events.append(First(sequence.key, first))
            self._scheduler.pin(sequence)
        else:
            self._stream(sequence, token_id, logprob, prompt_logprobs, finish, is_first=is_first)

    def _on_verified(self, sequence: Sequence, part: Part, drawn: Blocks[DrawnToken]) -> None:
        """Every token drawn but the last has been computed, too: it was a draft. Nothing after an end counts."""
        holds_blocks = sequence.stage is Stage.RUNNING
        finish: FinishReason | None = None
        kept = 0
        while kept < len(drawn) and finish is None:
            if kept and holds_blocks:
                self._advance(sequence, part.end + kept)
            finish = sequence.accept(drawn[kept].token_id)
            kept += 1
        sequence.resume()
        self._generated += kept
        self._speculator.learn(sequence, len(part.drafts), kept - 1)
        token_ids = tuple(token.token_id for token in drawn[:kept])
        logprobs = tuple(token.logprob for token in drawn[:kept] if token.logprob is not None)
        usage = None if finish is None else sequence.usage()
        self._tell(sequence, TokenChunk(token_ids, logprobs, finish=finish, usage=usage))

    def _stream(
        self,
        sequence: Sequence,
        token_id: int,
        logprob: TokenLogprob | None,
        prompt_logprobs: tuple[TokenLogprob | None, ...],
        finish: FinishReason | None,
        *,
        is_first: bool,
    ) -> None:
        """A chunk with more than a bare token. Usage is in the first one computed here, and in the last."""
        logprobs = () if logprob is None else (logprob,)
        usage = sequence.usage() if is_first or finish is not None else None
        self._tell(sequence, TokenChunk((token_id,), logprobs, prompt_logprobs, finish, usage))

    def _tell(self, sequence: Sequence, chunk: TokenChunk) -> None:
        """The sequence ends with the chunk that says so."""
        self._events.append(Streamed(sequence.key, chunk))
        if chunk.finish is not None:
            self._end(sequence)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        self._events.append(Failed(sequence.key, error))
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.key]
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.access.fence(sequence.key)
        self._scheduler.drop(sequence)
        self._runner.forget(sequence.key)
        self._speculator.forget(sequence.key)
