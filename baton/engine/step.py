"""What a step is made of, and who got into it."""

from __future__ import annotations

from collections.abc import Iterator
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
    has_chunks: bool  # whose KV may be there, to be handed over, before the results are

    def take_chunks(self) -> Iterator[tuple[Sequence, int]]:
        """Once: who takes part, and how far its context is computed when the step's KV is there."""
        self.has_chunks = False
        for sequence, part in zip(self.step.sequences, self.step.parts, strict=True):
            if sequence.stage is Stage.RUNNING:
                yield sequence, part.end


class Admission(NamedTuple):
    """Who has been given blocks, and who lost them for that."""

    admitted: list[Sequence]
    preempted: list[Sequence]
