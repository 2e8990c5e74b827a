"""What the device sampler needs to know of each row, packed for one upload. Pure numpy: no device is needed.

The byte layouts are those of ``RowDraw``, ``Edit`` and ``Count`` in ``src``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.engine.runner import Draw

ROW_DRAW = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),
        ("min_p_drop", "<f8"),
        ("inverse_high", "<f4"),
        ("inverse_low", "<f4"),
        ("span", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
        ("slot", "<i4"),
        ("first_edit", "<i4"),
        ("edits", "<i4"),
        ("kind", "<i4"),
        ("unused", "V12"),
    ]
)
EDIT = np.dtype([("token", "<i4"), ("bias", "<f4")])
COUNT = np.dtype(
    [("slot", "<i4"), ("fresh", "<i4"), ("first", "<i4"), ("prompt", "<i4"), ("output", "<i4"), ("unused", "V12")]
)

IDLE, LIKELIEST, DRAWN, REFUSED = 0, 1, 2, 3
NO_SLOT = -1
SPAN = 31.0  # e^-31 is less than half the unit of weight, 2^-43
COOLEST, HOTTEST = 1e-30, 1e30  # temperatures are kept between them, so that they and their inverses are float32

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Round:
    """Parts of contexts to count in one launch: a Count each, and their tokens one after the other."""

    parts: NDArray[np.void]
    tokens: NDArray[np.int32]


class SamplingRows:
    """Which sequence is drawn for in which row, and how.

    A sequence with penalties owns a slot: the counts of its tokens on the device. They are counted from its context
    when it is first set, and from then on by the sampler itself as it draws, so they are exact whatever the host knows
    yet. The slot is the key's until ``forget``, wherever the sequence sits, or until other rows need it.
    """

    def __init__(self, vocab_size: int, max_rows: int, max_edits: int) -> None:
        self.table_bytes = max_rows * (ROW_DRAW.itemsize + max_edits * EDIT.itemsize)
        self._vocab_size = vocab_size
        self._max_edits = max_edits
        self._draws = np.zeros(max_rows, ROW_DRAW)
        self._draws["slot"] = NO_SLOT
        self._edits: dict[int, NDArray[np.void]] = {}
        self._owners: dict[int, int] = {}  # by row, of rows with penalties
        self._slots: dict[int, int] = {}  # by key
        self._free = list(range(max_rows - 1, -1, -1))
        self._contexts: dict[int, tuple[Sequence[int], int]] = {}  # by key: context and prompt length, to be counted
        self._is_changed = True

    def set_row(self, row: int, key: int, draw: Draw | None, context: Sequence[int]) -> None:
        """From the next upload on, row ``row`` draws for ``key`` as ``draw`` says; None: it draws nothing.

        ``context`` is read no later than by the next ``rounds``, and only with penalties and when the key has no slot
        yet. It must then hold all the key's tokens: none may be in flight, which is so when the key has not drawn yet
        or was not in the step launched last. A row with more biased and forbidden tokens than ``max_edits`` is refused.
        """
        self._is_changed = True
        self._owners.pop(row, None)
        self._edits.pop(row, None)
        self._draws[row] = _IDLE_ROW
        if draw is None:
            return
        edits = _edits(draw, self._vocab_size)
        if len(edits) > self._max_edits:
            self._draws["kind"][row] = REFUSED
            return
        if len(edits):
            self._edits[row] = edits
        self._draws[row] = _pack(draw, self._vocab_size)
        if _has_penalties(draw):
            self._owners[row] = key
            if key not in self._slots:
                self._contexts[key] = (context, draw.prompt_length)

    def forget(self, key: int) -> None:
        """The sequence has ended or was preempted: its slot is free, and its context is counted anew if it returns."""
        self._contexts.pop(key, None)
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._free.append(slot)
        for row in [row for row, owner in self._owners.items() if owner == key]:
            self.set_row(row, key, None, ())

    def rounds(self, capacity: int) -> Iterator[Round]:
        """What is to be counted before the next draw, at most ``capacity`` tokens at a time. Hands out the slots."""
        wanted = {key: self._contexts[key] for key in self._owners.values() if key in self._contexts}
        self._contexts.clear()
        parts: list[tuple[int, int, int, int, int, bytes]] = []
        tokens: list[NDArray[np.int32]] = []
        length = 0
        for key, (context, prompt_length) in wanted.items():
            slot = self._take_slot(key)
            every = np.array(context, np.int32)
            for start in range(0, max(len(every), 1), capacity):
                piece = every[start : start + capacity]
                if parts and (start or length + len(piece) > capacity):
                    yield _round(parts, tokens)
                    parts, tokens, length = [], [], 0
                prompt = min(max(prompt_length - start, 0), len(piece))
                parts.append((slot, int(start == 0), length, prompt, len(piece) - prompt, b""))
                tokens.append(piece)
                length += len(piece)
        if parts:
            yield _round(parts, tokens)

    @property
    def is_changed(self) -> bool:
        """Something was set since the last ``pack``."""
        return self._is_changed

    def pack(self, table: Bytes) -> int:
        """Write the table and return its bytes. Exhaust ``rounds`` first: it hands out the slots."""
        self._is_changed = False
        for row, key in self._owners.items():
            self._draws["slot"][row] = self._slots[key]
        first = 0
        for row, edits in self._edits.items():
            self._draws["first_edit"][row] = first
            self._draws["edits"][row] = len(edits)
            first += len(edits)
        end = self._draws.nbytes
        table[:end] = self._draws.view(np.uint8)
        if first:
            table[end : end + first * EDIT.itemsize] = np.concatenate(list(self._edits.values())).view(np.uint8)
        return end + first * EDIT.itemsize

    def _take_slot(self, key: int) -> int:
        """A slot for ``key``; without a free one, that of a sequence that is in no row now."""
        if not self._free:
            present = set(self._owners.values())
            self.forget(next(other for other in self._slots if other not in present))
        self._slots[key] = self._free.pop()
        return self._slots[key]


def _round(parts: list[tuple[int, int, int, int, int, bytes]], tokens: list[NDArray[np.int32]]) -> Round:
    return Round(np.array(parts, COUNT), np.concatenate(tokens))


def _has_penalties(draw: Draw) -> bool:
    sampling = draw.sampling
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _edits(draw: Draw, vocab_size: int) -> NDArray[np.void]:
    """Biases by token, those of one token in their order; a forbidden token's last is -inf.

    Tokens outside the vocabulary, say a card's EOS beyond it, cannot be drawn anyway.
    """
    if not draw.sampling.logit_bias and not draw.forbidden:
        return _NO_EDITS
    given = (*draw.sampling.logit_bias, *((token, -math.inf) for token in draw.forbidden))
    inside = sorted((edit for edit in given if 0 <= edit[0] < vocab_size), key=lambda edit: edit[0])
    with np.errstate(over="ignore"):
        return np.array(inside, EDIT)


def _pack(draw: Draw, vocab_size: int) -> tuple[object, ...]:
    """``draw`` as a ROW_DRAW, but for slot and edits, which ``SamplingRows.pack`` fills in."""
    sampling = draw.sampling
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if sampling.temperature == 0:
        return (0, 1.0, -math.inf, 0.0, 0.0, 0.0, *_floats(penalties), 0, NO_SLOT, 0, 0, LIKELIEST, b"")
    temperature = min(max(sampling.temperature, COOLEST), HOTTEST)
    high = np.float32(1.0 / temperature)
    drop = temperature * math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return (
        sampling.seed & 0xFFFFFFFFFFFFFFFF,
        sampling.top_p,
        drop,
        high,
        1.0 / temperature - float(high),
        *_floats((SPAN * temperature, *penalties)),
        sampling.top_k if sampling.top_k < vocab_size else 0,
        NO_SLOT,
        0,
        0,
        DRAWN,
        b"",
    )


def _floats(values: Sequence[float]) -> Iterator[np.float32]:
    with np.errstate(over="ignore"):
        return iter(np.array(values, np.float32))


_NO_EDITS = np.zeros(0, EDIT)
_IDLE_ROW = (0, 1.0, -math.inf, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0, NO_SLOT, 0, 0, IDLE, b"")
