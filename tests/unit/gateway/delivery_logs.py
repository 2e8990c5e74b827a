"""Delivery logs in a test's directory, with quotas to recover them into; and one in a process that can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.core.clock import ManualClock, RandomIds
from baton.core.telemetry import Meter, SilentMeter
from baton.core.types import Delivered, QuotaClaim
from baton.state.quota.memory import MemoryQuota
from gateway.delivery_log import ENDING, DeliveryLog
from gateway.delivery_recovery import DeliveryRecovery, RecoveryPolicy
from tests.unit.gateway.quota_doubles import UnsteadyQuota, claim

NAMESPACE = "baton"
SOME = Delivered(10, 2, 7, energy_millijoules=300)
SCRIPT = """
import sys, signal
from pathlib import Path
from baton.core.types import Delivered
from tests.unit.gateway.delivery_logs import opened, order
with opened(Path(sys.argv[1])) as log:
    slots = [log.slot(order(f"r{number}")) for number in range(int(sys.argv[2]))]
    for number, slot in enumerate(slots):
        slot.note(Delivered(10, 2, number % 21))
    print("noted", flush=True)
    signal.pause()
"""


def opened(
    directory: Path, namespace: str = NAMESPACE, meter: Meter | None = None
) -> AbstractContextManager[DeliveryLog]:
    return DeliveryLog.opened(directory, namespace, RandomIds(), meter or SilentMeter())


def order(request_id: str = "r0", owner: str = "gateway-1") -> QuotaClaim:
    """Of ten tokens in and twenty out."""
    return replace(claim(request_id), owner=owner)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{ENDING}"))


@contextmanager
def streaming_process(directory: Path, streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """Stream ``r<number>`` was delivered 10 tokens, and ``number`` modulo 21. Killed at the latest with the block."""
    command = [sys.executable, "-c", SCRIPT, str(directory), str(streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"noted\n"
            yield process
        finally:
            process.kill()


def left_behind(directory: Path, *deliveries: tuple[QuotaClaim, Delivered], namespace: str = NAMESPACE) -> Path:
    """The file of a process that ended without freeing its slots."""
    before = files(directory)
    with opened(directory, namespace) as log:
        for each, delivered in deliveries:
            slot = log.slot(each)
            assert slot is not None
            slot.note(delivered)
    [path] = set(files(directory)) - set(before)
    return path


@dataclass
class Desk:
    """Recovers what is in ``directory`` into ``books``, over a line that a test may cut."""

    directory: Path
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    meter: Meter = field(default_factory=SilentMeter)

    def __post_init__(self) -> None:
        self.books = MemoryQuota(self.clock)
        self.line = UnsteadyQuota(self.books)
        self.recovery = self.another()

    def another(self) -> DeliveryRecovery:
        return DeliveryRecovery(self.directory, NAMESPACE, self.line, self.clock, self.meter, RecoveryPolicy())

    async def charged(self) -> dict[str, int]:
        """Output tokens by request, once all leases have ended."""
        self.clock.advance(100)
        await self.books.expire()
        return {entry.request_id: entry.output_tokens for entry in await self.books.entries("umbrella")}
