"""What a step is made of, and who got into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.runner import Part
from baton.engine.sequence import Sequence, Stage


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


@dataclass(slots=True)
class Flight:
    """A launched step whose results have not been collected."""

    number: int
    step: Step
    is_told: bool = False  # what its chunks have written can be handed over, and that has been told

    @property
    def is_to_be_told(self) -> bool:
        return bool(self.step.chunked) and not self.is_told

    def tell(self) -> list[tuple[Sequence, int]]:
        """Those that are still running, and how far each one's context is computed once the step's KV is written."""
        self.is_told = True
        both = zip(self.step.sequences, self.step.parts, strict=True)
        return [(sequence, part.end) for sequence, part in both if sequence.stage is Stage.RUNNING]


class Admission(NamedTuple):
    """Who has been given blocks, and who lost them for that."""

    admitted: list[Sequence]
    preempted: list[Sequence]
