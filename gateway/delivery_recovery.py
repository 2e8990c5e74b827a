"""Delivery logs that dead gateways left behind: Redis is told what they hold, then they are deleted.

Every gateway looks after the whole directory, and the first one to take a file's lock has it. What it tells is
progress, as in a renewal: a client may go on elsewhere within its lease as before, and what others took over is charged
with what they deliver, once.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import StateUnavailable
from baton.core.telemetry import Meter
from baton.core.tenancy_api import QuotaApi
from baton.core.types import NOTHING_DELIVERED, Progress
from gateway.delivery_log import ENDING, PIECE
from gateway.delivery_slots import PAGE, Slots, namespace_of, read_slots

log = logging.getLogger(__name__)

TOLD_AT_ONCE = 100  # reservations: a script holds up the server


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """``seconds``: between two looks at the directory, which is a small part of a lease's length."""

    seconds: float = 1.0


class DeliveryRecovery:
    def __init__(
        self, directory: Path, namespace: str, quota: QuotaApi, clock: Clock, meter: Meter, policy: RecoveryPolicy
    ) -> None:
        """``namespace``: of ``quota``'s counters; logs of others are left to their own gateways."""
        self._directory = directory
        self._namespace = namespace
        self._quota = quota
        self._clock = clock
        self._policy = policy
        self._complained: set[Path] = set()  # of these: each is named in the log once
        self._given_up: set[Path] = set()  # what is no log, or was told and cannot be deleted
        self._is_waiting = False
        self._recovered = meter.counter("quota_recovered_streams", "Streams of dead gateways that Redis was told of")
        self._damaged = meter.counter("quota_damaged_slots", "Unreadable entries in delivery logs of dead gateways")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at once, then every so often."""
        async with background(self._every(), "delivery recovery"):
            yield

    async def _every(self) -> None:
        while True:
            try:
                await self.once()
                self._is_waiting = False
            except StateUnavailable as error:
                if not self._is_waiting:
                    log.warning("delivery logs of dead gateways wait for Redis", extra={"error": error.message})
                self._is_waiting = True
            await self._clock.sleep(self._policy.seconds)

    async def once(self) -> None:
        """Raises StateUnavailable; what could not be told whole stays, and telling it again changes nothing."""
        for path in self._logs():
            try:
                with _orphan(path) as descriptor:
                    if descriptor is not None:
                        await self._recover(path, descriptor)
            except OSError as error:  # too many files open, say: it is tried again
                self._complain(path, error.strerror)

    def _logs(self) -> list[Path]:
        try:
            found = sorted(entry for entry in self._directory.iterdir() if entry.suffix == ENDING)
        except OSError as error:
            self._complain(self._directory, error.strerror)
            return []
        return [path for path in found if path not in self._given_up]

    async def _recover(self, path: Path, descriptor: int) -> None:
        page = os.pread(descriptor, PAGE, 0)
        namespace = namespace_of(page)
        if namespace is None and page:
            self._give_up(path, "it is no delivery log of this version")
        elif namespace == self._namespace:
            slots = await asyncio.to_thread(_read_all, descriptor)
            await self._tell(path, slots)
            self._delete(path)
        elif namespace is None:
            self._delete(path)  # its process died before it had begun

    async def _tell(self, path: Path, slots: Slots) -> None:
        organisations: dict[str, list[Progress]] = {}
        for each in slots.deliveries:
            if each.progress.delivered != NOTHING_DELIVERED:
                organisations.setdefault(each.organisation, []).append(each.progress)
        found = 0
        for organisation, progress in organisations.items():
            for first in range(0, len(progress), TOLD_AT_ONCE):
                found += await self._quota.recover(organisation, progress[first : first + TOLD_AT_ONCE])
        self._recovered.add(found)
        subject = {"file": path.name, "logged": sum(map(len, organisations.values())), "told": found}
        log.info("delivery log of a dead gateway taken over", extra=subject)
        if slots.damaged:
            self._damaged.add(slots.damaged)
            log.warning("delivery log %s: %d entries could not be read, and are left out", path, slots.damaged)

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._give_up(path, f"it cannot be deleted: {error.strerror}")

    def _give_up(self, path: Path, why: str) -> None:
        self._given_up.add(path)
        self._complain(path, why)

    def _complain(self, path: Path, why: str | None) -> None:
        if path not in self._complained:
            self._complained.add(path)
            log.warning("delivery log %s is not taken over: %s", path, why)


@contextmanager
def _orphan(path: Path) -> Iterator[int | None]:
    """The file's descriptor while the lock is ours; None: its process lives, or somebody else has dealt with it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor if _is_orphan(descriptor) else None
    finally:
        os.close(descriptor)


def _is_orphan(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _read_all(descriptor: int) -> Slots:
    """A piece at a time, whatever its size."""
    found: list[Slots] = []
    at = PAGE
    while data := os.pread(descriptor, PIECE, at):
        found.append(read_slots(data))
        at += len(data)
    return Slots([each for slots in found for each in slots.deliveries], sum(slots.damaged for slots in found))
