from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.core.clock import ManualClock
from baton.core.types import Candidate
from gateway.fleet import FleetView
from gateway.links import LinkPool, tended
from tests.unit.gateway.doubles import ScriptedDecode, candidate, record


class CountedLink(ScriptedDecode):
    def __init__(self, worker: Candidate) -> None:
        super().__init__(worker.worker_id)
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True


class Opened:
    """Remembers the links that a pool opened."""

    def __init__(self, *workers: str) -> None:
        self.links: list[CountedLink] = []
        self.view = FleetView(ManualClock())
        self.view.update([record(worker) for worker in workers])
        self.pool = LinkPool(self._open, self.view)

    def _open(self, worker: Candidate) -> CountedLink:
        self.links.append(CountedLink(worker))
        return self.links[-1]


def test_one_process_has_one_link_and_a_restarted_one_another() -> None:
    opened = Opened("a")
    assert opened.pool(candidate("a")) is opened.pool(candidate("a"))
    assert opened.pool(candidate("a", epoch=2)) is not opened.pool(candidate("a"))
    assert len(opened.links) == 2


def test_links_of_departed_processes_are_closed_and_others_stay() -> None:
    opened = Opened("a", "b")
    opened.pool(candidate("a"))
    opened.pool(candidate("b"))
    opened.view.update([replace(record("a"), epoch=2), record("b")])
    asyncio.run(opened.pool.close_departed())
    assert [link.closed for link in opened.links] == [True, False]
    assert len(opened.pool) == 1


def test_a_link_with_running_requests_outlives_a_registry_that_forgot_its_worker() -> None:
    opened = Opened("a")
    opened.pool(candidate("a"))
    opened.view.update([])
    with opened.view.sending("a"):
        asyncio.run(opened.pool.close_departed())
        assert not opened.links[0].closed
    asyncio.run(opened.pool.close_departed())
    assert opened.links[0].closed


def test_all_links_are_closed_at_the_end_and_departed_ones_before() -> None:
    opened = Opened("a", "b")

    async def run() -> None:
        async with tended(opened.pool, ManualClock()) as pool:
            pool(candidate("a"))
            pool(candidate("b"))
            opened.view.update([record("b")])
            async with asyncio.timeout(20):
                while not opened.links[0].closed:
                    await asyncio.sleep(0)
            assert not opened.links[1].closed
        assert opened.links[1].closed

    asyncio.run(run())
