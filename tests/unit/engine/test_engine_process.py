"""The engine process and its front: started, lost, refused, left alone."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress

import psutil
import pytest
import uvloop

from baton.core.errors import ConfigError, PeerUnavailable
from baton.core.types import StopRules, TokenRequest
from baton.engine.client import spawn_engine, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import Part

CONFIG = EngineConfig(kv_blocks=256)
LONG = TokenRequest("r", tuple(range(3, 40)), stop=StopRules(max_tokens=900, ignore_eos=True))
SHORT = TokenRequest("r", tuple(range(3, 40)), stop=StopRules(max_tokens=3, ignore_eos=True))
PATIENCE = 30.0

FRONT = """
import asyncio, sys, psutil
from baton.engine.client import spawn_engine
from baton.engine.config import EngineConfig

async def main():
    async with spawn_engine(EngineConfig(kv_blocks=8)):
        print(psutil.Process().children()[0].pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def engines() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it is just ending
            found += [process] if "baton.engine.process" in process.cmdline() else []
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_killing_the_process_is_told_to_every_waiter_and_to_the_front() -> None:
    async def main() -> None:
        async with spawn_engine(CONFIG) as engine:
            async with engine.reserve(LONG) as decoding, engine.reserve(LONG) as held, engine.prefill(LONG) as run:
                async with aclosing(decoding.decode(None)) as chunks:
                    await anext(chunks)
                    engines()[0].send_signal(signal.SIGKILL)
                    with pytest.raises(PeerUnavailable):
                        async for _ in chunks:
                            pass
                with pytest.raises(PeerUnavailable):
                    await held.write_blocks(0, bytes(engine.card.format.block_bytes))
                with pytest.raises(PeerUnavailable):
                    await run.read_blocks(0, 1)
            assert "exit code -9" in await engine.closed()
            with pytest.raises(PeerUnavailable):
                await engine.reserve(LONG).__aenter__()

    asyncio.run(main())


def test_the_process_ends_with_its_context_and_not_with_signals_meant_for_the_front() -> None:
    async def main() -> None:
        async with spawn_engine(CONFIG) as engine:
            [process] = engines()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            async with engine.reserve(SHORT) as reservation, aclosing(reservation.decode(None)) as chunks:
                assert len([chunk async for chunk in chunks]) == 3
            with pytest.raises(ZeroDivisionError):
                async with spawn_engine(CONFIG):
                    raise ZeroDivisionError
            assert engines() == [process]
        assert engines() == []

    asyncio.run(main())


def test_the_process_does_not_outlive_a_front_that_is_killed() -> None:
    front = subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    engine = psutil.Process(int(front.stdout.readline()))
    front.kill()
    front.wait()
    front.stdout.close()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_a_cancelled_start_leaves_no_process() -> None:
    async def main() -> None:
        starting = asyncio.create_task(spawn_engine(CONFIG).__aenter__())
        await asyncio.to_thread(wait_until, lambda: bool(engines()))
        engines()[0].suspend()  # so that it cannot become ready
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        assert engines() == []

    asyncio.run(main())


def test_runs_under_uvloop() -> None:
    async def main() -> list[int]:
        async with spawn_engine(CONFIG) as engine, engine.reserve(SHORT) as reservation:
            await reservation.write_blocks(0, bytes(engine.card.format.block_bytes))
            async with aclosing(reservation.decode(None)) as chunks:
                return [token async for chunk in chunks for token in chunk.token_ids]

    assert uvloop.run(main()) == asyncio.run(main())


def test_a_load_error_reaches_the_front_with_its_type_and_message() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="kv_cache_mb"):
            await spawn_engine(EngineConfig(kv_cache_mb=0)).__aenter__()

    asyncio.run(main())
    assert engines() == []


def test_neither_the_front_nor_a_fake_engine_loads_torch() -> None:
    code = "import sys, baton.engine.client, baton.engine.process; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="about torch")
def test_openmp_is_told_the_threads_before_torch_loads() -> None:
    code = (
        "from baton.engine.process import _prepare_threads; from baton.engine.config import EngineConfig; import os\n"
        "_prepare_threads(EngineConfig(threads=1)); import torch\n"
        "assert (torch.get_num_threads(), os.environ['GOMP_SPINCOUNT']) == (1, '0'), torch.get_num_threads()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE * 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_runner_ends_the_engine_and_every_request() -> None:
    def explode(parts: Sequence[Part]) -> None:
        if len(parts) == 2:
            raise RuntimeError("a bug")

    async def main() -> None:
        async with threaded_engine(FakeRunner(fake_card(), 256, on_step=explode), CONFIG) as engine:
            async with engine.reserve(LONG) as one, engine.reserve(LONG) as two, aclosing(one.decode(None)) as chunks:
                await anext(chunks)
                for stream in (two.decode(None), chunks):
                    with pytest.raises(PeerUnavailable):
                        async for _ in stream:
                            pass
            await engine.closed()

    asyncio.run(main())


def test_a_request_cancelled_during_a_step_is_gone_after_that_step() -> None:
    entered, proceed = threading.Event(), threading.Event()
    sizes: list[int] = []

    def gate(parts: Sequence[Part]) -> None:
        sizes.append(len(parts))
        entered.set()
        assert proceed.wait(PATIENCE)

    async def main() -> None:
        async with threaded_engine(FakeRunner(fake_card(), 256, on_step=gate), CONFIG) as engine:
            async with engine.reserve(LONG) as reservation, aclosing(reservation.decode(None)) as chunks:
                reading = asyncio.create_task(anext(chunks))
                await asyncio.to_thread(entered.wait, PATIENCE)
                reading.cancel()
                await asyncio.wait({reading})
            assert engine.stats.held_blocks > 0
            proceed.set()
            deadline = time.monotonic() + PATIENCE
            while engine.stats.held_blocks or engine.stats.running:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.002)
            assert sizes == [1]

    asyncio.run(main())


def test_an_admission_is_told_before_the_step_that_follows_it() -> None:
    proceed = threading.Event()

    def gate(parts: Sequence[Part]) -> None:
        assert proceed.wait(PATIENCE)

    async def main() -> None:
        async with (
            threaded_engine(FakeRunner(fake_card(), 256, on_step=gate), CONFIG) as engine,
            engine.reserve(SHORT, compute_up_to=len(SHORT.prompt)) as reservation,
        ):
            assert engine.stats.steps == 0
            proceed.set()
            async with aclosing(reservation.decode(None)) as chunks:
                assert len([chunk async for chunk in chunks]) == 3

    asyncio.run(main())


def test_the_loop_counts_its_own_work() -> None:
    async def main() -> None:
        async with threaded_engine(FakeRunner(fake_card(), 256), CONFIG) as engine:
            assert engine.stats.host_seconds == 0.0
            async with (
                engine.reserve(SHORT, compute_up_to=len(SHORT.prompt)) as reservation,
                aclosing(reservation.decode(None)) as chunks,
            ):
                assert len([chunk async for chunk in chunks]) == 3
            assert engine.stats.host_seconds > 0.0

    asyncio.run(main())


def test_closing_the_engine_ends_whoever_still_waits() -> None:
    async def main() -> None:
        async with threaded_engine(FakeRunner(fake_card(), 256), CONFIG) as engine:
            watching = asyncio.create_task(engine.closed())
            changes = engine.block_changes()
            reading = asyncio.create_task(anext(changes))
            await asyncio.sleep(0)
        assert "closed" in await watching
        with pytest.raises(PeerUnavailable):
            await reading

    asyncio.run(main())
