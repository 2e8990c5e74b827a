"""One request inside the engine: its tokens, its blocks, how far it is computed and when it ends. Pure."""

from __future__ import annotations

from enum import StrEnum

from baton.core.blockhash import child_hash, root_hash
from baton.core.types import FinishReason, FirstToken, ModelCard, TokenLogprob, TokenRequest, Usage
from baton.engine.blocks import Allocation
from baton.engine.runner import Draw, Part


class Work(StrEnum):
    """What the engine was asked for: only the first token and the prompt's KV, or the whole answer."""

    PREFILL = "prefill"
    DECODE = "decode"


class Stage(StrEnum):
    WAITING = "waiting"  # holds no blocks
    HELD = "held"  # holds blocks, waits for its context to be written or for the word to compute it
    RUNNING = "running"  # takes part in steps
    PINNED = "pinned"  # a finished prefill, whose blocks are being read


class Sequence:
    """A request's life. ``context`` is prompt + generated + output, only ever appended to.

    ``computed`` leading tokens of the context have their KV in ``blocks``; ``pending`` are still to be computed, 1 in
    steady decoding: the token drawn last.
    """

    def __init__(
        self,
        key: int,
        work: Work,
        request: TokenRequest,
        card: ModelCard,
        *,
        deadline: float | None,
        compute_up_to: int = 0,
    ) -> None:
        self.key = key
        self.work = work
        self.request = request
        self.deadline = deadline
        self._compute_up_to = compute_up_to
        self.stage = Stage.WAITING
        self.arrival = 0
        self.preemptions = 0
        self.context = [*request.prompt, *request.generated]
        self.computed = 0
        self.blocks: list[int] = []
        self.hits = 0
        self.published = 0
        self.announced_blocks = 0  # of a prefill: blocks already reported as filled
        self.cached_tokens: int | None = None  # of the first admission
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.block_size = card.format.block_size
        self._root = root_hash(salt=request.salt, weights_hash=card.weights_hash, kv_format=str(card.format))
        self._hashes: list[bytes] = []
        self._prompt_length = len(request.prompt)
        self._first_output = len(self.context)
        stop = request.stop
        self._stop_ids = frozenset(stop.stop_token_ids).union(() if stop.ignore_eos else card.eos_token_ids)
        self._draw = Draw(request.sampling, self._prompt_length, (), request.logprobs)
        self._early_draw = Draw(request.sampling, self._prompt_length, tuple(sorted(self._stop_ids)), request.logprobs)

    @property
    def rank(self) -> tuple[int, int]:
        """Scheduling order, lowest first: priority, then arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def pending(self) -> int:
        return len(self.context) - self.computed

    @property
    def capacity(self) -> int:
        """Tokens that the blocks have room for."""
        return len(self.blocks) * self.block_size

    @property
    def output_tokens(self) -> int:
        """Output so far, with that of earlier hops."""
        return len(self.context) - self._prompt_length

    @property
    def delivered(self) -> bool:
        """This engine has drawn, or was handed, at least one token of the request."""
        return len(self.context) > self._first_output

    @property
    def starts_itself(self) -> bool:
        """Held with so little left to compute that it was told not to wait for the word."""
        return self.stage is Stage.HELD and self.pending <= self._compute_up_to

    @property
    def is_preemptible(self) -> bool:
        """A prefill is not: its blocks may be on their way to another worker at this moment."""
        return self.work is Work.DECODE and self.stage is Stage.RUNNING

    def usage(self) -> Usage:
        """``completion_tokens`` counts the output of earlier hops too: it is the request's total."""
        cached = min(self.cached_tokens or 0, self._prompt_length)
        return Usage(self._prompt_length, cached, self.output_tokens)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def context_blocks(self) -> int:
        return -(-len(self.context) // self.block_size)

    def blocks_wanted(self, growth_window: int) -> int:
        """Blocks to reserve at admission: the context, and for an answer room to grow."""
        growth = 0
        if self.work is Work.DECODE:
            growth = min(self.request.stop.max_tokens - self.output_tokens, growth_window)
        return -(-(len(self.context) + growth) // self.block_size)

    def sharable_hashes(self) -> list[bytes]:
        """Names of the blocks that may come from the prefix cache: never the last token, whose logits are needed.

        Prompt log-probabilities need the logits of every row, so nothing is shared while they are still owed.
        """
        if self._owes_prompt_logprobs():
            return []
        return self._hashes_to((len(self.context) - 1) // self.block_size)

    def give_blocks(self, allocation: Allocation) -> None:
        self.blocks = allocation.blocks
        self.hits = self.published = allocation.hits
        self.computed = allocation.hits * self.block_size
        if self.cached_tokens is None:
            self.cached_tokens = self.computed

    def take_blocks(self) -> list[int]:
        """Give up the blocks and all that was computed in them; the tokens stay."""
        blocks, self.blocks = self.blocks, []
        self.computed = self.hits = self.published = 0
        del self.prompt_logprobs[1:]
        return blocks

    def unpublished(self) -> list[tuple[int, bytes]]:
        """Computed full blocks that have not been offered to the prefix cache, with their names; then marks them."""
        full = self.computed // self.block_size
        if full <= self.published:
            return []
        names = self._hashes_to(full)
        fresh = [(self.blocks[i], names[i]) for i in range(self.published, full)]
        self.published = full
        return fresh

    def _hashes_to(self, count: int) -> list[bytes]:
        for i in range(len(self._hashes), count):
            tokens = self.context[i * self.block_size : (i + 1) * self.block_size]
            self._hashes.append(child_hash(self._hashes[-1] if i else self._root, tokens))
        return self._hashes[:count]

    # --- tokens -------------------------------------------------------------------------------------------------------

    def part(self, end: int) -> Part:
        """The share of a step that computes the context up to ``end``; it draws when that is all of it."""
        whole = end == len(self.context)
        draw = None
        if whole:
            draw = self._early_draw if self.output_tokens < self.request.stop.min_tokens else self._draw
        context = self.context if whole else self.context[:end]
        if not self._owes_prompt_logprobs():
            return Part(context, self.computed, self.blocks, draw)
        targets = self.request.prompt[self.computed + 1 : end + 1]
        return Part(context, self.computed, self.blocks, draw, self.request.prompt_logprobs, targets)

    def accept(self, token_id: int) -> FinishReason | None:
        """Append a drawn token, which counts even when it is EOS or a stop id, and say whether it was the last."""
        self.context.append(token_id)
        if token_id in self._stop_ids:
            return FinishReason.STOP
        if self.output_tokens >= self.request.stop.max_tokens:
            return FinishReason.LENGTH
        return None

    def import_context(self, first: FirstToken) -> FinishReason | None:
        """All of the context was written to the blocks by another worker, which also drew ``first``."""
        self.computed = len(self.context)
        self.cached_tokens = first.usage.cached_tokens
        return self.accept(first.token_id)

    def _owes_prompt_logprobs(self) -> bool:
        return self.request.prompt_logprobs is not None and not self.delivered
