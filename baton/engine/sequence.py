"""One request inside the engine: its tokens, its blocks, how far it is computed and when it ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from baton.core.blockhash import child_hash, request_root
from baton.core.errors import TransferRejected
from baton.core.types import (
    CacheClass,
    FilledBlocks,
    FinishReason,
    FirstToken,
    ModelCard,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from baton.engine.blocks import Allocation
from baton.engine.runner import Draw, Part
from baton.engine.share import TenantShare
from baton.engine.tiers import PLACE


class Work(StrEnum):
    """What the engine was asked for: only the first token and the prompt's KV, or the whole answer."""

    PREFILL = "prefill"
    DECODE = "decode"


class Stage(StrEnum):
    WAITING = "waiting"  # holds no blocks
    HELD = "held"  # holds blocks, waits for its context to be written or for the word to compute it
    RUNNING = "running"  # takes part in steps
    PINNED = "pinned"  # a finished prefill, whose blocks are being read
    ENDED = "ended"  # holds nothing; a step in flight may still compute for it, to no purpose


class Sequence:
    """A request's life. ``context`` is prompt + generated + output as far as it is known, only ever appended to.

    ``computed`` leading tokens of the context have their KV in ``blocks``; for ``launched`` of them, no fewer, it is
    there or a step in flight computes it. ``length`` counts what there is to compute: the context, the token in flight
    (a launched step draws it) included, but never the last one that may be drawn. ``length - launched`` tokens are
    still to be launched, 1 in steady decoding: the token drawn last.
    """

    share: TenantShare  # what its tenant has had; set when it is submitted

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
        self.is_prefill = work is Work.PREFILL
        self.request = request
        self.deadline = deadline
        self._compute_up_to = compute_up_to
        self.stage = Stage.WAITING
        self.arrival = 0
        self.preemptions = 0
        self.submitted_at = 0.0
        self.waiting_since = 0.0
        self.output_when_queued = -1  # tokens that it had when its waiting began
        self.was_rescued = False  # admitted for having waited too long
        self.charged_to = 0  # leading tokens that its tenant was charged for, or that cost it nothing
        self.charged_output = 0  # drawn tokens that its tenant was charged for
        self.promised = 0  # admitted tokens still to be computed and charged
        self.fixed_blocks = 0  # held in a way that cannot be preempted
        self.context = [*request.prompt, *request.generated]
        self.length = len(self.context)
        self.launched = 0
        self.computed = 0
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that the blocks have room for
        self.hits = 0
        self.published = 0
        self.announced_blocks = 0  # of a prefill: blocks already reported as filled
        self.cached_tokens: int | None = None  # of the first admission
        self.delivered = False  # this engine has drawn, or was handed, at least one token of the request
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.block_size = card.format.block_size
        self._window = request.attention_window
        self._root = request_root(request, card)
        self._hashes: list[bytes] = []
        self.prompt_length = len(request.prompt)
        self.max_chunk = request.max_chunk_tokens or card.context_length  # tokens of it in one step
        self._cache_class = request.cache.cache_class
        self._keep_blocks = min(request.cache.keep_tokens, self.prompt_length) // self.block_size
        self.first_output = len(self.context)
        stop = request.stop
        self._full_length = self.prompt_length + stop.max_tokens
        self._computable = self.length if self.is_prefill else self._full_length - 1
        self._early_length = self.prompt_length + stop.min_tokens  # a draw after fewer tokens must not end the answer
        self._stop_ids = frozenset(stop.stop_token_ids).union(() if stop.ignore_eos else card.eos_token_ids)
        # With penalties a draw depends on the tokens before it, which the GPU counts as it draws them.
        self._may_speculate = request.speculation and not self.is_prefill and not request.sampling.has_penalties
        self._draw = Draw(request.sampling, self.prompt_length, (), request.logprobs)
        self._early_draw = Draw(request.sampling, self.prompt_length, tuple(sorted(self._stop_ids)), request.logprobs)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lowest first: tier, then priority, then arrival. Between a tier's tenants it decides nothing."""
        return (PLACE[self.request.tier], -self.request.priority, self.arrival)

    @property
    def output_tokens(self) -> int:
        """Known output, with that of earlier hops."""
        return len(self.context) - self.prompt_length

    @property
    def starts_itself(self) -> bool:
        """Held with so little left to compute that it was told not to wait for the word."""
        return self.stage is Stage.HELD and self.length - self.launched <= self._compute_up_to

    @property
    def is_preemptible(self) -> bool:
        """A prefill is not: its blocks may be on their way to another worker at this moment."""
        return not self.is_prefill and self.stage is Stage.RUNNING

    def usage(self) -> Usage:
        """``completion_tokens`` counts the output of earlier hops too: it is the request's total."""
        cached = min(self.cached_tokens or 0, self.prompt_length)
        return Usage(self.prompt_length, cached, self.output_tokens)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def context_blocks(self) -> int:
        return -(-len(self.context) // self.block_size)

    def blocks_wanted(self, growth_window: int) -> int:
        """Blocks to reserve at admission: the context, and for an answer room to grow."""
        growth = 0
        if not self.is_prefill:
            growth = min(self.request.stop.max_tokens - self.output_tokens, growth_window)
        return -(-(len(self.context) + growth) // self.block_size)

    @property
    def _sharable_blocks(self) -> int:
        """Prompt log-probabilities need the logits of every row, so nothing is shared while they are still owed."""
        owes_all = self.request.prompt_logprobs is not None and not self.delivered
        return 0 if owes_all else (len(self.context) - 1) // self.block_size

    def sharable_hashes(self) -> Iterator[bytes]:
        """Names of the blocks that may come from the prefix cache: never the last token, whose logits are needed.

        Computed as they are asked for: who finds nothing under the first name needs no other.
        """
        return map(self._hash, range(self._sharable_blocks))

    def give_blocks(self, allocation: Allocation) -> None:
        self.blocks = allocation.blocks
        self.capacity = len(self.blocks) * self.block_size
        self.hits = self.published = allocation.hits
        self.computed = self.launched = allocation.hits * self.block_size
        if self.cached_tokens is None:
            self.cached_tokens = self.computed
        if not self.delivered:
            del self.prompt_logprobs[1:]  # of an earlier attempt: they are owed again

    @property
    def kept_hits(self) -> list[int]:
        """Blocks found in the prefix cache that this request wants kept."""
        kept = self.hits if self._cache_class is CacheClass.KEEP else min(self.hits, self._keep_blocks)
        return self.blocks[:kept]

    def add_block(self, block: int) -> None:
        self.blocks.append(block)
        self.capacity += self.block_size

    def take_blocks(self) -> list[int]:
        """Give up the blocks and all that was computed in them; the tokens stay, those in flight too."""
        blocks, self.blocks = self.blocks, []
        self.computed = self.launched = self.capacity = self.hits = self.published = 0
        return blocks

    def advance(self, end: int) -> Iterable[tuple[int, bytes, CacheClass]]:
        """The context is computed up to ``end``. Returns full blocks that have not been offered to the prefix cache
        yet, with their names and classes."""
        self.computed = end
        full = end // self.block_size
        if full <= self.published:
            return ()
        first, self.published = self.published, full
        if self._cache_class is CacheClass.NONE:
            full = min(full, self._keep_blocks)
        names = self._hashes_to(full)[first:]
        kept = self._keep_blocks - first
        classes = (CacheClass.KEEP if i < kept else self._cache_class for i in range(len(names)))
        return list(zip(self.blocks[first:full], names, classes, strict=True))

    def take_filled(self, computed: int) -> FilledBlocks | None:
        """Blocks of a prefill that are final when the context is computed so far, without those reported before. The
        last block of the context may be partly filled."""
        if not self.is_prefill:
            return None
        is_whole = computed == len(self.context)
        last = self.context_blocks() if is_whole else computed // self.block_size
        if last <= self.announced_blocks:
            return None
        first, self.announced_blocks = self.announced_blocks, last
        return FilledBlocks(first, last - first, computed if is_whole else last * self.block_size)

    def name_blocks(self) -> None:
        """Compute the names that ``advance`` will need: worth doing while the device computes the blocks."""
        self._hashes_to(self.launched // self.block_size)

    def _hashes_to(self, count: int) -> list[bytes]:
        for index in range(len(self._hashes), count):
            self._hash(index)
        return self._hashes[:count]

    def _hash(self, index: int) -> bytes:
        """The name of a full block; those before it are known."""
        if index == len(self._hashes):
            tokens = self.context[index * self.block_size : (index + 1) * self.block_size]
            self._hashes.append(child_hash(self._hashes[-1] if index else self._root, tokens))
        return self._hashes[index]

    # --- tokens -------------------------------------------------------------------------------------------------------

    def launch(self, end: int) -> Part:
        """The share of a step that computes the context up to ``end``, which counts as launched from now on.

        It draws when nothing is left after that.
        """
        start, self.launched = self.launched, end
        draw = None
        if end == self.length:
            draw = self._draw if end >= self._early_length else self._early_draw
            if end < self._computable:
                self.length = end + 1
        alternatives = self.request.prompt_logprobs
        if alternatives is None or start >= self.first_output or self.delivered:
            return Part(self.key, self.context, start, end, self.blocks, draw, window=self._window)
        targets = self.request.prompt[start + 1 : end + 1]
        return Part(self.key, self.context, start, end, self.blocks, draw, alternatives, targets, self._window)

    @property
    def most_drafts(self) -> int:
        """Drafts that may follow the token launched last: past it a draw stays one that may be made, in the same way.

        None before the first token, which prompt log-probabilities may come with.
        """
        if not (self._may_speculate and self.delivered):
            return 0
        end = self.launched
        last = self._computable if end >= self._early_length else min(self._computable, self._early_length - 1)
        return max(0, last - end)

    @property
    def is_verifying(self) -> bool:
        """Drafts are in flight: what there is to compute next is not known before they are collected."""
        return self.launched == self.length < self._computable and self.stage is Stage.RUNNING

    def verify(self, part: Part, drafts: tuple[int, ...]) -> Part:
        """``part``, launched just now, with ``drafts``: nothing more is launched before ``resume``."""
        self.length = part.end
        return part._replace(drafts=drafts)

    def resume(self) -> None:
        """The tokens drawn after drafts have been accepted: go on from the last of them."""
        self.launched = self.computed
        self.length = min(len(self.context), self._computable)

    def accept(self, token_id: int) -> FinishReason | None:
        """Append a token that was in flight, which counts even when it is EOS or a stop id. Says whether it is the
        last one."""
        self.context.append(token_id)
        self.delivered = True
        if token_id in self._stop_ids:
            return FinishReason.STOP
        if len(self.context) >= self._full_length:
            return FinishReason.LENGTH
        return None

    def lose_draw(self) -> None:
        """The blocks are given up and no token is in flight: the one that was did not come."""
        self.length = len(self.context)

    def import_prefix(self, block_count: int) -> Iterable[tuple[int, bytes, CacheClass]]:
        """The first ``block_count`` blocks were written and verified: the rest is computed on top of them. Returns what
        ``advance`` does. TransferRejected unless they hold more than is computed already, and less than the context."""
        most = self._sharable_blocks
        if not self.hits < block_count <= most:
            raise TransferRejected(f"imported blocks: must be between {self.hits + 1} and {most}, got {block_count}")
        self.hits = block_count
        self.launched = self.cached_tokens = block_count * self.block_size
        self.charged_to = max(self.charged_to, self.launched)
        return self.advance(self.launched)

    def import_context(self, first: FirstToken) -> FinishReason | None:
        """All of the context was written to the blocks by another worker, which also drew ``first``."""
        self.computed = self.launched = self.charged_to = len(self.context)
        self.cached_tokens = first.usage.cached_tokens
        self.length = min(self.computed + 1, self._computable)
        return self.accept(first.token_id)
