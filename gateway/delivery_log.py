"""What each stream in progress was delivered, in a mapped file that outlives its process.

Redis hears of deliveries with each renewal of a lease. This file has them in between: a count is a store into memory,
no system call, and the kernel keeps the page when the process is killed. A lock on the file says that its process
lives; the kernel frees it, and then whoever finds the file tells Redis (``delivery_recovery``). It survives a process,
not a machine: nothing waits for a disk.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.clock import Ids
from baton.core.errors import ConfigError
from baton.core.telemetry import Meter
from baton.core.types import NOTHING_DELIVERED, Delivered, Progress, QuotaClaim
from gateway.delivery_slots import (
    CLAIMED,
    DELIVERED,
    FREE,
    LENGTH,
    PAGE,
    SEAL,
    SLOT,
    TEXT,
    WORD_BYTES,
    SlotIdentity,
    header_page,
)

log = logging.getLogger(__name__)

ENDING = ".deliveries"
PIECE = 256 * SLOT  # what a file grows by: whole pages
ATTEMPTS = 3  # to name a file that nobody else has
_PRIVATE = 0o600
_NOTHING = memoryview(bytes(WORD_BYTES * (CLAIMED - DELIVERED))).cast("Q")


class _Piece:
    """A part of the file, mapped as long as a slot of it is known: a request may outlive the log at the end of its
    process. ``words`` are stored one at a time, whole."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self.bytes = mmap.mmap(descriptor, PIECE, offset=offset)
        self.words: memoryview[int] = memoryview(self.bytes).cast("Q")

    def write(self, at: int, identity: SlotIdentity) -> None:
        """Into the free slot whose first word is ``at``: the seal last."""
        words, text = self.words, at * WORD_BYTES + TEXT
        words[at + DELIVERED : at + CLAIMED] = _NOTHING
        words[at + CLAIMED], words[at + CLAIMED + 1] = identity.claimed
        words[at + LENGTH] = len(identity.text)
        self.bytes[text : text + len(identity.text)] = identity.text
        words[at + SEAL] = identity.seal


class DeliverySlot:
    """Counts one reservation's deliveries until it is freed."""

    __slots__ = ("_at", "_log", "_piece", "_words")

    def __init__(self, log: DeliveryLog, piece: _Piece, at: int) -> None:
        self._log = log
        self._piece = piece
        self._words = piece.words
        self._at = at

    def note(self, delivered: Delivered) -> None:
        """What was delivered up to now, in all; no system call."""
        words, at = self._words, self._at + DELIVERED
        words[at] = delivered.input_tokens
        words[at + 1] = delivered.cached_tokens
        words[at + 2] = delivered.output_tokens
        words[at + 3] = delivered.energy_millijoules

    def free(self) -> None:
        """Redis knows how the reservation ended."""
        self._words[self._at + SEAL] = FREE
        self._log.take_back(self._piece, self._at)


class DeliveryLog:
    """A process's own file. It grows by pieces, is never moved, and goes when all its slots are free at the end."""

    def __init__(self, descriptor: int, meter: Meter) -> None:
        self._descriptor = descriptor
        self._end = PAGE
        self._free: list[tuple[_Piece, int]] = []  # and the first word of a slot in it
        self._taken = 0
        self._is_full = False
        self._unlogged = meter.counter("quota_unlogged_requests", "Requests that the delivery log had no room for")

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, namespace: str, ids: Ids, meter: Meter) -> Iterator[DeliveryLog]:
        """A new one in ``directory``, which is made. ConfigError when it cannot be written to, or its disk is full."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, descriptor = _own_file(directory, ids)
        except OSError as error:
            raise _unusable(directory, error) from error
        built = cls(descriptor, meter)
        try:
            try:
                _write(descriptor, header_page(namespace), 0)
                built._grow()
            except OSError as error:
                raise _unusable(directory, error) from error
            yield built
        finally:
            built._close(path)

    @property
    def taken(self) -> int:
        """Slots that are not free."""
        return self._taken

    def slot(self, claim: QuotaClaim) -> DeliverySlot | None:
        """For a reservation that nothing was delivered of yet. None: there is no room for it."""
        progress = Progress(claim.request_id, claim.account.tenant.name, claim.owner, NOTHING_DELIVERED)
        claimed = claim.input_tokens, claim.output_tokens
        identity = SlotIdentity.of(claim.account.organisation.name, progress, claimed)
        if identity is None or not self._has_room():
            self._unlogged.add()
            return None
        piece, at = self._free.pop()
        self._taken += 1
        piece.write(at, identity)
        return DeliverySlot(self, piece, at)

    def take_back(self, piece: _Piece, at: int) -> None:
        """A slot that its reservation has freed."""
        self._free.append((piece, at))
        self._taken -= 1

    def _has_room(self) -> bool:
        """Grows where there is none. A disk that is full is told of once, and asked again."""
        if self._free:
            return True
        try:
            self._grow()
        except OSError as error:
            if not self._is_full:
                log.warning("delivery log cannot grow: new streams are not logged", extra={"error": error.strerror})
            self._is_full = True
            return False
        self._is_full = False
        return True

    def _grow(self) -> None:
        """Zeros are written rather than left out: storing into a page that the disk has no room for would be the end of
        the process."""
        try:
            _write(self._descriptor, bytes(PIECE), self._end)
            piece = _Piece(self._descriptor, self._end)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += PIECE
        self._free += [(piece, at) for at in reversed(range(0, PIECE // WORD_BYTES, SLOT // WORD_BYTES))]

    def _close(self, path: Path) -> None:
        """What Redis was not told of stays, for whoever takes the file over."""
        if self._taken:
            log.warning("delivery log left behind: Redis was not told of all", extra={"streams": self._taken})
        else:
            with suppress(OSError):
                path.unlink()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # what is still mapped would keep it
        os.close(self._descriptor)


def _own_file(directory: Path, ids: Ids) -> tuple[Path, int]:
    """New, and locked. Who looks for orphans may find it before it is locked, and takes it away: then another one."""
    for _ in range(ATTEMPTS):
        path = directory / f"{ids.epoch():016x}{ENDING}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BlockingIOError:
            pass
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)
    raise ConfigError(f"delivery log directory {directory}: somebody else takes new files away")


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """All of it. A disk with room for a part says so at the next attempt."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"delivery log directory {directory}: cannot be written to: {error.strerror}")
