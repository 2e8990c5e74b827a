"""An engine's runner without a model or torch: deterministic, quick, and unable to decode from wrong KV.

The "KV" of a position is a 16-byte digest chained over all tokens up to it, so it is a function of exactly the tokens
that real KV depends on. Before a part is computed, every position before it is checked against the tokens: bytes that
went to a wrong block, came from another prompt, or were overwritten too early fail the request with CorruptTransfer.
(Blocks that were right once are only read again when one of them has been written to since.)

A launched step is computed when it is collected, as late as can be, and on a copy of what it was given. So a token in
flight is really unknown until then, and blocks that are given away too early are seen to be wrong.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from baton.core.errors import CorruptTransfer
from baton.core.types import KvFormat, ModelCard, TokenLogprob
from baton.engine.fake_device import FakeCopies
from baton.engine.runner import Draw, DrawnToken, Part, PartDetail, RunnerTimes, StepResult, no_look
from baton.engine.sharedpool import PoolMemory

DIGEST_BYTES = 16
EOS = 2
CANDIDATES = 32  # likeliest tokens that a context leads to

_HALF = math.log(0.5)


def fake_card(
    *, model: str = "fake", block_size: int = 16, context_length: int = 8192, vocab_size: int = 512
) -> ModelCard:
    """A card for ``FakeRunner``: 16 bytes of "KV" a token, EOS is id 2."""
    return ModelCard(
        model=model,
        architecture="fake",
        context_length=context_length,
        vocab_size=vocab_size,
        weights_hash="fake",
        format=KvFormat(dtype="fake", block_size=block_size, layers=1, kv_heads=1, head_dim=DIGEST_BYTES // 2),
        eos_token_ids=(EOS,),
    )


class FakeRunner:
    """Satisfies ``Runner``. What it draws depends on the context, the seed (if temperature > 0), the forbidden ids and,
    with penalties, on where the prompt ends.

    ``on_step`` is called in the engine's thread when a step is launched: a test may wait there. ``step_seconds`` is
    the time a step takes, for demos. ``memory`` holds the pool if it is to be shared, ``device`` if it is to look like
    one on a GPU. Wrong use of the protocol is a bug of the caller: RuntimeError.
    """

    def __init__(
        self,
        card: ModelCard,
        total_blocks: int,
        *,
        steps_ahead: int = 0,
        step_seconds: float = 0.0,
        on_step: Callable[[Sequence[Part]], None] | None = None,
        memory: PoolMemory | None = None,
        device: PoolMemory | None = None,
    ) -> None:
        self.card = card
        self.memory = memory
        self.copies = None if device is None else FakeCopies(device, self._note_written)
        self.total_blocks = total_blocks
        self.steps_ahead = steps_ahead
        self.times = RunnerTimes()
        self._step_seconds = step_seconds
        self._on_step = on_step
        self._block_size = card.format.block_size
        self._block_bytes = card.format.block_bytes
        held = memory or device
        self._pool = memoryview(bytearray(total_blocks * self._block_bytes)) if held is None else held.view
        if memory is not None:
            memory.on_fill = self._note_written
        self._writes = 0
        self._written = [0] * total_blocks  # per block, the number of the last write to it
        self._verified: dict[int, _Verified] = {}  # per block, the prefix that was seen to be right up to its end
        self._flights: deque[list[Part]] = deque()
        self._is_filled = False  # the oldest flight has been computed, and is not yet collected
        self._look: Callable[[], None] = no_look
        self._drawing: set[int] = set()  # keys for which the step launched last draws
        self._verifying: set[int] = set()  # keys for which the step launched last checks drafts
        self._drawn: dict[int, int] = {}  # by key, what the step collected last has drawn

    def launch(self, parts: Sequence[Part]) -> None:
        if self._on_step is not None:
            self._on_step(parts)
        if len(self._flights) > self.steps_ahead:
            raise RuntimeError(f"{len(self._flights)} steps are in flight, {self.steps_ahead} may be")
        self._flights.append([self._copied(part) for part in parts])
        self._drawing = {part.key for part in parts if part.draw is not None and not part.drafts}
        self._verifying = {part.key for part in parts if part.drafts}

    def while_waiting(self, look: Callable[[], None]) -> None:
        self._look = look

    def has_filled(self) -> bool:
        return self._is_filled

    def collect(self) -> StepResult:
        if self._step_seconds:
            time.sleep(self._step_seconds)
            before = self.times
            waited, device = before.waited + self._step_seconds, before.device + self._step_seconds
            self.times = before._replace(waited=waited, device=device)
        parts = self._flights[0]
        results = [self._compute(self._resolved(part)) for part in parts]
        self._is_filled = True
        self._look()
        self._is_filled = False
        self._flights.popleft()
        if not self._flights:
            self._verifying.clear()
        self._drawn = {p.key: token for p, (token, _) in zip(parts, results, strict=True) if token is not None}
        details = {index: detail for index, (_, detail) in enumerate(results) if detail is not None}
        return StepResult([token for token, _ in results], details)

    def forget(self, key: int) -> None:
        self._drawing.discard(key)
        self._verifying.discard(key)

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        return b"".join(self._pool[b * self._block_bytes : (b + 1) * self._block_bytes] for b in blocks)

    def write_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        size = self._block_bytes
        self._note_written(blocks)
        for i, block in enumerate(blocks):
            self._pool[block * size : (block + 1) * size] = payload[i * size : (i + 1) * size]

    def close(self) -> None:
        self._pool = memoryview(b"")
        if self.memory is not None:
            self.memory.close()
        if self.copies is not None:
            self.copies.close()

    def _copied(self, part: Part) -> Part:
        """The part as it is now, its drafts taken for known tokens; its sequence's lists go on changing."""
        missing = part.end - len(part.context)
        if missing > 0 and (missing > 1 or not self._flights or part.key not in self._drawing):
            raise RuntimeError(f"part {part.key}: {missing} tokens up to {part.end} are neither known nor being drawn")
        if part.draw is not None and missing < 0:
            raise RuntimeError(f"part {part.key}: draws after {part.end} of {len(part.context)} known tokens")
        if part.key in self._verifying:
            raise RuntimeError(f"part {part.key}: what its drafts in flight lead to is not known")
        if part.drafts and (missing or part.draw is None or part.end - part.start != 1):
            raise RuntimeError(f"part {part.key}: drafts must follow one known token that draws")
        if part.end + len(part.drafts) > len(part.blocks) * self._block_size:
            raise RuntimeError(f"part {part.key}: {len(part.blocks)} blocks for {part.end} + {len(part.drafts)} tokens")
        context = [*part.context[: part.end], *part.drafts]
        return part._replace(context=context, end=part.end + len(part.drafts), blocks=list(part.blocks))

    def _resolved(self, part: Part) -> Part | None:
        """The part with the token that was in flight when it was launched; None when the draw failed."""
        if len(part.context) == part.end:
            return part
        token = self._drawn.get(part.key)
        return None if token is None else part._replace(context=[*part.context, token])

    def _compute(self, part: Part | None) -> tuple[int | None, PartDetail | None]:
        """The token and what else there is to say; of a part without its last token, nothing."""
        if part is None:
            return None, None
        verified = self._recall(part)
        digest = verified.digest
        rows: list[bytes] = []
        for block, start, tokens in self._spans(part, len(verified.blocks)):
            expected = _chain(digest, tokens)
            known = max(0, min(part.start - start, len(tokens))) * DIGEST_BYTES
            if known and not self._holds(block, expected[:known]):
                wrong = CorruptTransfer(f"KV of positions {start}..{start + len(tokens) - 1} is wrong")
                return None, PartDetail(error=wrong)
            if known < len(expected):
                self._put(block, known, expected[known:])
            elif start + len(tokens) == part.start // self._block_size * self._block_size:
                self._remember(part, expected[-DIGEST_BYTES:])
            if part.prompt_logprobs is not None or part.drafts:
                rows += (expected[i : i + DIGEST_BYTES] for i in range(known, len(expected), DIGEST_BYTES))
            digest = expected[-DIGEST_BYTES:]
        return (None, self._verified_drafts(part, rows)) if part.drafts else self._results(part, rows, digest)

    def _verified_drafts(self, part: Part, rows: list[bytes]) -> PartDetail:
        """The tokens that follow the part's rows, up to the first that its draft does not foresee."""
        assert part.draw is not None
        drawn: list[DrawnToken] = []
        for position, digest in enumerate(rows, part.start + 1):
            ranked = _candidates(digest, self.card.vocab_size)
            token_id = _draw(ranked, digest, position, part.draw)
            logprob = None if part.draw.logprobs is None else _logprob(ranked, token_id, part.draw.logprobs)
            drawn.append(DrawnToken(token_id, logprob))
            if position < part.end and token_id != part.context[position]:
                break
        return PartDetail(drawn=tuple(drawn))

    def _results(self, part: Part, rows: list[bytes], digest: bytes) -> tuple[int | None, PartDetail | None]:
        """What follows from the digests of the part's ``rows`` (kept for prompt log-probabilities) and the last one."""
        prompt_logprobs = tuple(
            _logprob(_candidates(row, self.card.vocab_size), token, part.prompt_logprobs or 0)
            for row, token in zip(rows, part.targets, strict=False)
        )
        token_id = logprob = None
        if part.draw is not None:
            ranked = _candidates(digest, self.card.vocab_size)
            token_id = _draw(ranked, digest, part.end, part.draw)
            logprob = None if part.draw.logprobs is None else _logprob(ranked, token_id, part.draw.logprobs)
        if logprob is None and not prompt_logprobs:
            return token_id, None
        return token_id, PartDetail(logprob, prompt_logprobs)

    def _spans(self, part: Part, skip: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Block id, first position and tokens of each block of the context but the first ``skip``."""
        for start in range(skip * self._block_size, len(part.context), self._block_size):
            yield part.blocks[start // self._block_size], start, tuple(part.context[start : start + self._block_size])

    def _put(self, block: int, offset: int, data: bytes) -> None:
        self._note_written([block])
        for half, at in zip(_halves(data), self._planes(block), strict=True):
            begin = at + offset // 2
            self._pool[begin : begin + len(half)] = half

    def _holds(self, block: int, digests: bytes) -> bool:
        """Whether the block begins with ``digests``."""
        planes = zip(_halves(digests), self._planes(block), strict=True)
        return all(self._pool[at : at + len(half)] == half for half, at in planes)

    def _planes(self, block: int) -> tuple[int, int]:
        """Where the planes of K and V begin, which hold the first and the second halves of the digests."""
        at = block * self._block_bytes
        return at, at + self._block_bytes // 2

    def _note_written(self, blocks: Sequence[int]) -> None:
        self._writes += 1
        for block in blocks:
            self._written[block] = self._writes

    def _recall(self, part: Part) -> _Verified:
        """The full blocks before the part, if they were right in an earlier step and none was written to since."""
        count = part.start // self._block_size
        seen = self._verified.get(part.blocks[count - 1]) if count else None
        if (
            seen is not None
            and seen.blocks == part.blocks[:count]
            and seen.tokens == part.context[: count * self._block_size]
            and seen.writes >= max(self._written[block] for block in seen.blocks)
        ):
            return seen
        return _Verified([], [], b"\0" * DIGEST_BYTES, 0)

    def _remember(self, part: Part, digest: bytes) -> None:
        count = part.start // self._block_size
        if count > 1:
            self._verified.pop(part.blocks[count - 2], None)  # the longer one serves from now on
        tokens = list(part.context[: count * self._block_size])
        self._verified[part.blocks[count - 1]] = _Verified(list(part.blocks[:count]), tokens, digest, self._writes)


@dataclass(frozen=True, slots=True)
class _Verified:
    """Tokens whose KV stands in ``blocks``, its last digest, and how many writes there had been when it was read."""

    blocks: list[int]
    tokens: list[int]
    digest: bytes
    writes: int


def _halves(digests: bytes) -> tuple[bytes, bytes]:
    """All first halves, and all second halves."""
    halves = memoryview(digests).cast("Q")
    return halves[0::2].tobytes(), halves[1::2].tobytes()


@lru_cache(maxsize=65_536)
def _chain(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The digests of ``tokens`` that follow ``parent``, 16 bytes each."""
    digests: list[bytes] = []
    for token in tokens:
        parent = blake2b(parent + struct.pack("<I", token), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return b"".join(digests)


def _candidates(digest: bytes, vocab_size: int) -> list[int]:
    """Distinct token ids from likeliest to least likely; the one at rank r has probability 2 ** -(r + 1)."""
    words = struct.unpack(f"<{CANDIDATES}H", blake2b(digest, digest_size=2 * CANDIDATES, person=b"rank").digest())
    return list(dict.fromkeys(word % vocab_size for word in words))


def _draw(ranked: list[int], digest: bytes, position: int, draw: Draw) -> int:
    """The likeliest token that is not forbidden, counted from a rank that the seed decides (0: greedy)."""
    skip = _skip(digest, position, draw)
    allowed = [token for token in ranked if token not in draw.forbidden]
    if allowed:
        return allowed[min(skip, len(allowed) - 1)]
    return next(token for token in range(len(draw.forbidden) + 1) if token not in draw.forbidden)


def _skip(digest: bytes, position: int, draw: Draw) -> int:
    sampling = draw.sampling
    if not sampling.temperature and not sampling.has_penalties:
        return 0
    seed = sampling.seed if sampling.temperature else 0
    prompt_length = draw.prompt_length if sampling.has_penalties else 0
    noise = blake2b(
        digest + struct.pack("<QQQ", seed % 2**64, position, prompt_length), digest_size=8, person=b"draw"
    ).digest()
    word = int.from_bytes(noise, "little") | 1 << 20
    return (word & -word).bit_length() - 1  # trailing zeros: rank r with probability 2 ** -(r + 1)


def _logprob(ranked: list[int], token_id: int, top: int) -> TokenLogprob:
    rank = ranked.index(token_id) if token_id in ranked else CANDIDATES
    best = tuple((token, (i + 1) * _HALF) for i, token in enumerate(ranked[:top]))
    return TokenLogprob(token_id, (rank + 1) * _HALF, best)
