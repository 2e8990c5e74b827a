"""What a step is made of, and who got into it."""

from __future__ import annotations

from typing import NamedTuple

from baton.engine.runner import Part
from baton.engine.sequence import Sequence


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


class Admission(NamedTuple):
    """Who has been given blocks, and who lost them for that."""

    admitted: list[Sequence]
    preempted: list[Sequence]
