"""Steps in flight: where their results arrive, and what the host makes of them when they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.core.errors import BatonError, InvalidRequest
from baton.engine.cuda.batch import PackedBatch
from baton.engine.cuda.draft_rows import without_draft_rows
from baton.engine.cuda.sampler import MAX_EDITS, TOO_MANY_EDITS
from baton.engine.cuda.scores import Scores
from baton.engine.cuda.step_arrays import Ints
from baton.engine.cuda.step_buffer import Copy, Readback
from baton.engine.runner import Part, PartDetail, StepResult


class Slot:
    """Where one step's tokens and flags arrive, and where it is seen how far the step is; free again once its flight
    has landed."""

    def __init__(self, results: torch.Tensor, copy: Copy) -> None:
        """``results`` int32 [2, rows] on the device: the drawn tokens and the sampler's flags."""
        self._copy = Readback(results, copy)
        self.done = torch.cuda.Event()
        self._filled = torch.cuda.Event()
        self._tells_filled = False

    def reuse(self) -> None:
        """Another step's results are to arrive here."""
        self._tells_filled = False

    def mark_filled(self) -> None:
        """All that writes the step's KV has been queued on torch's current stream."""
        self._filled.record()
        self._tells_filled = True

    def has_filled(self) -> bool:
        """False, too, for a step that was not marked."""
        return self._tells_filled and self._filled.query()

    def queue(self) -> None:
        """Queue the copy of the results on torch's current stream, behind all that the step needs."""
        self._copy.queue()
        self.done.record()

    def wait(self) -> None:
        """Until what ``queue`` queued, and everything before it, is done."""
        self.done.synchronize()

    def tokens(self, rows: Ints) -> list[int]:
        """The tokens of ``rows``; anything for row -1."""
        return self._copy.values[0][rows].tolist()

    def flagged(self, rows: Ints, used: int) -> dict[int, int]:
        """The sampler's flags by index into ``rows``, of those that have one; ``used`` rows were drawn from."""
        flags = self._copy.values[1]
        if not flags[:used].any():
            return {}
        by_index = np.where(rows >= 0, flags[rows], 0)
        return {index: int(by_index[index]) for index in np.flatnonzero(by_index).tolist()}


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a piece of a part's prompt, on their way."""

    part: int
    targets: Sequence[int]
    scores: Scores


@dataclass(frozen=True, slots=True)
class DrawnScores:
    """Log-probabilities of the tokens that ``parts`` drew, on their way."""

    parts: Sequence[int]
    scores: Scores


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step whose results are on their way."""

    slot: Slot
    parts: Sequence[Part]  # those launched, then the rows of their drafts
    launched: int
    packed: PackedBatch
    drawn: DrawnScores | None
    prompts: list[PromptScores]

    def land(self) -> StepResult:
        """Wait for the step and read its results."""
        self.slot.wait()
        token_ids: list[int | None] = [*self.slot.tokens(self.packed.logit_row)]
        if self.packed.draws_nothing:
            drawn = zip(self.parts, token_ids, strict=True)
            token_ids = [None if part.draw is None else token_id for part, token_id in drawn]
        failed = self._failed()
        details = self._details(token_ids) if self.prompts or self.drawn is not None else {}
        for index, error in failed.items():
            token_ids[index] = None
            details[index] = PartDetail(error=error)
        if self.launched < len(self.parts):
            return without_draft_rows(self.parts, self.launched, token_ids, details)
        return StepResult(token_ids, details)

    def _failed(self) -> dict[int, BatonError]:
        """By part: those whose logits were not finite, and those that ask for more than can be drawn for."""
        flagged = self.slot.flagged(self.packed.logit_row, self.packed.logits)
        return {
            index: _error(flag, self.parts[index])
            for index, flag in flagged.items()
            if self.parts[index].draw is not None
        }

    def _details(self, token_ids: Sequence[int | None]) -> dict[int, PartDetail]:
        """The log-probabilities of the parts that asked; a prompt's come in pieces, in order."""
        details: dict[int, PartDetail] = {}
        for piece in self.prompts:
            before = details.get(piece.part, PartDetail())
            tops = [self.parts[piece.part].prompt_logprobs or 0] * len(piece.targets)
            scores = (*before.prompt_logprobs, *piece.scores.read(piece.targets, tops))
            details[piece.part] = PartDetail(prompt_logprobs=scores)
        if self.drawn is not None:
            tokens = [token_ids[index] or 0 for index in self.drawn.parts]
            tops = [alternatives(self.parts[index]) or 0 for index in self.drawn.parts]
            for index, score in zip(self.drawn.parts, self.drawn.scores.read(tokens, tops), strict=True):
                details[index] = replace(details.get(index, PartDetail()), logprob=score)
        return details


def alternatives(part: Part) -> int | None:
    """How many alternatives to the drawn token the part asks for; None: for no log-probability at all."""
    return None if part.draw is None else part.draw.logprobs


def _error(flag: int, part: Part) -> BatonError:
    if flag == TOO_MANY_EDITS:
        limit = f"must be at most {MAX_EDITS} biased and forbidden tokens together"
        draw = part.draw
        count = 0 if draw is None else len(draw.sampling.logit_bias) + len(draw.forbidden)
        return InvalidRequest.out_of_range("logit_bias", count, limit)
    return BatonError(f"the model produced logits that are not finite at position {part.end}")
