"""When drafts are tried: for whom, how many, and whether a step waits for the tokens in flight that they follow. Pure.

Drafts must follow a known token, so a sequence that speculates does not run ahead. The whole step waits for it, and
those who decode beside it lose what running ahead saves them; so it waits only when the drafts are expected to bring
more than that. A sequence whose drafts are wrong pauses, longer each time; a batch with many rows does not speculate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.config import EngineConfig
from baton.engine.drafter import Drafter, Query
from baton.engine.runner import Part
from baton.engine.sequence import Sequence as Work

WAITING = 0.2  # of a step: what one that decodes loses when its token is waited for
LEARNING = 0.25  # weight of the newest try
PAUSES = (8, 256)  # tokens, the first pause and the longest


@dataclass(slots=True)
class Acceptance:
    """How many of a sequence's drafts are right at a try, of late, and since when it pauses."""

    expected: float = 1.0
    pause: int = PAUSES[0]
    resumes_at: int = 0  # length of the context

    def learn(self, accepted: int, length: int, worth: float) -> None:
        """A try had ``accepted`` right drafts and has led to a context of ``length``."""
        self.expected += LEARNING * (accepted - self.expected)
        if accepted:
            self.pause = PAUSES[0]
        if self.expected < worth:
            self.expected = worth  # so the first try after the pause decides
            self.resumes_at = length + self.pause
            self.pause = min(2 * self.pause, PAUSES[1])


class Speculator:
    """Chooses drafts for steps and learns from what becomes of them."""

    def __init__(self, drafter: Drafter, config: EngineConfig) -> None:
        self._drafter = drafter
        self._draft_tokens = config.draft_tokens
        self._max_rows = 0 if config.speculation == "off" else config.speculation_max_rows
        self._acceptances: dict[int, Acceptance] = {}
        self._has_waited = False  # the next step is planned after a wait
        self.proposed = 0
        self.accepted = 0

    def waits(self, running: Sequence[Work]) -> bool:
        """Whether the next step is to be planned when the tokens in flight are known, for the sake of drafts."""
        if len(running) >= self._max_rows:
            return False
        gain = sum(self._expected(sequence) for sequence in running)
        self._has_waited = gain > WAITING * sum(not sequence.is_prefill for sequence in running)
        return self._has_waited

    def draft(
        self,
        sequences: Sequence[Work],
        parts: Sequence[Part],
        budget: int,
        make_room: Callable[[Work, int], int],
    ) -> list[tuple[int, Part]]:
        """Parts of a planned step that are to be replaced, by index, with drafts of at most ``budget`` in all.

        ``make_room(sequence, count)`` finds room for up to ``count`` drafts and says for how many.
        """
        has_waited, self._has_waited = self._has_waited, False
        budget = min(budget, self._max_rows - len(parts))
        if budget <= 0:
            return []
        chosen = [i for i, (one, part) in enumerate(zip(sequences, parts, strict=True)) if self._is_ready(one, part)]
        if not chosen:
            return []
        share = min(self._draft_tokens, max(1, budget // len(chosen)))
        asked = [
            Query(sequences[i].key, sequences[i].context, min(share, sequences[i].most_drafts)) for i in chosen[:budget]
        ]
        found: list[tuple[int, Part]] = []
        for index, proposed in zip(chosen, self._drafter.propose(asked), strict=False):
            drafts = proposed[: make_room(sequences[index], len(proposed))]
            if drafts:
                found.append((index, sequences[index].verify(parts[index], drafts)))
            elif has_waited:
                self._learn(sequences[index], 0)
        return found

    def learn(self, sequence: Work, proposed: int, accepted: int) -> None:
        """Of ``proposed`` drafts ``accepted`` were right, whose tokens the context has."""
        self.proposed += proposed
        self.accepted += accepted
        self._learn(sequence, accepted)

    def forget(self, key: int) -> None:
        self._acceptances.pop(key, None)
        self._drafter.forget(key)

    def _expected(self, sequence: Work) -> float:
        """Right drafts that the sequence's next try will have if it is waited for."""
        if sequence.is_verifying:
            return self._acceptance(sequence).expected
        if sequence.length - sequence.launched != 1 or sequence.most_drafts < 2:
            return 0.0
        acceptance = self._acceptance(sequence)
        if len(sequence.context) < acceptance.resumes_at:
            return 0.0
        return acceptance.expected if self._drafter.expects(sequence.key, sequence.context) else 0.0

    def _is_ready(self, sequence: Work, part: Part) -> bool:
        """The part is one row that draws, of a known token, and drafts may follow."""
        length = len(sequence.context)
        return (
            part.end == length == part.start + 1
            and part.draw is not None
            and sequence.most_drafts > 0
            and length >= self._acceptance(sequence).resumes_at
        )

    def _learn(self, sequence: Work, accepted: int) -> None:
        acceptance = self._acceptances.setdefault(sequence.key, Acceptance())
        acceptance.learn(accepted, len(sequence.context), self._drafter.worth)

    def _acceptance(self, sequence: Work) -> Acceptance:
        return self._acceptances.get(sequence.key) or Acceptance()
