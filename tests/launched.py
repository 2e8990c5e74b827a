"""A whole stack as ``baton up`` starts it, in a temporary directory, with a client on its gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.cli.answers import Answer
from baton.cli.ask import ask
from baton.cli.cases import Case
from baton.cli.launcher import Stack, StackPlan, launched
from baton.cli.models import resolve
from baton.cli.state_dir import StateDir
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.types import GenerateRequest, ProcessRecord, Role

GENEROUS_SECONDS = 120.0


@dataclass(frozen=True)
class RunningStack:
    stack: Stack
    client: Client
    model: str

    async def ask(self, name: str, request: GenerateRequest) -> Answer:
        (answer,) = await ask(self.client, Case(name, request), SystemClock())
        return answer

    async def workers(self) -> dict[str, ProcessRecord]:
        return {r.id: r for r in await self.stack.registry.processes() if r.role in (Role.PREFILL, Role.DECODE)}

    def kill(self, process_id: str, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(next(c.process.pid for c in self.stack.children if c.id == process_id), signum)

    async def until(self, holds: Callable[[dict[str, ProcessRecord]], bool], what: str) -> dict[str, ProcessRecord]:
        """Poll the workers' registered state until ``holds``; fails with what was waited for."""
        try:
            async with asyncio.timeout(GENEROUS_SECONDS):
                while not holds(workers := await self.workers()):
                    await asyncio.sleep(0.02)
                return workers
        except TimeoutError as error:
            raise AssertionError(f"never came true: {what}; workers: {await self.workers()}") from error

    async def settled(self) -> dict[str, ProcessRecord]:
        """The workers as they are from now on: idle, and looked at again since this was called."""
        seen = {record.id: record.beats for record in (await self.workers()).values()}

        def idle_again(workers: dict[str, ProcessRecord]) -> bool:
            stats = [record.stats for record in workers.values()]
            fresh = all(record.beats >= seen.get(record.id, 0) + 2 for record in workers.values())
            return fresh and all(not (s.held_blocks or s.running or s.waiting) for s in stats)

        return await self.until(idle_again, "all workers idle")

    async def assert_idle(self) -> None:
        """Every block is back: free + cached = total, nothing held, nobody runs or waits."""
        for record in (await self.settled()).values():
            stats = record.stats
            assert stats.free_blocks + stats.held_blocks + stats.cached_blocks == stats.total_blocks, record


@asynccontextmanager
async def running_stack(
    model: str, *flags: str, prefill: int = 1, decode: int = 1, kvtransfer: int = 0
) -> AsyncIterator[RunningStack]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as directory:
        plan = StackPlan(
            resolve(model), prefill=prefill, decode=decode, kvtransfer=kvtransfer, flags=("gateway.port=0", *flags)
        )
        async with (
            launched(plan, StateDir(Path(directory))) as stack,
            Client(stack.record.gateway, stack.record.key) as client,
        ):
            yield RunningStack(stack, client, plan.model.name)


def prompt_request(ids: Sequence[int], max_tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=tuple(ids), max_tokens=max_tokens, timeout=GENEROUS_SECONDS)
