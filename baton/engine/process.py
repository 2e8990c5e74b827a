"""The engine's process: ``python -m baton.engine.process --fd N``, spawned by its front and tied to its life.

It has one thread for commands and steps, and no asyncio: a busy front cannot slow a step down. It ends when the
channel does, or with the front's death; a bug in the runner ends it with a traceback and a non-zero exit code.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from baton.core.clock import Clock, SystemClock
from baton.core.errors import BatonError, ConfigError
from baton.core.tether import die_with_parent
from baton.engine.channel import ChannelClosed, SyncChannel
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.drafter import Drafter, NgramDrafter, NoDrafts
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.inbox import Inbox
from baton.engine.messages import DeviceCommand, Load, LoadFailed, Loading, Ready
from baton.engine.model_drafter import ModelDrafter
from baton.engine.runner import Runner
from baton.engine.sharedpool import Descriptors, shared_pool_memory

# How long commands are taken in before the next step, be there more of them or not: a thousand requests that come at
# once take a third of a second. A device that has nothing to compute should not wait for the last of them.
INTAKE_SECONDS = 0.05
IDLE_INTAKE_SECONDS = 0.004


def serve(
    runner: Runner,
    drafter: Drafter,
    config: EngineConfig,
    channel: SyncChannel,
    clock: Clock,
    descriptors: Descriptors,
) -> None:
    """Announce the engine and run it until the front hangs up; asleep while there is no work.

    What commands and admissions bring about is reported before the step that follows them, which may take long.
    """
    core = EngineCore(runner, drafter, config, clock)
    try:
        _loop(core, runner, channel, clock, descriptors)
    finally:
        core.access.close()


def _loop(core: EngineCore, runner: Runner, channel: SyncChannel, clock: Clock, descriptors: Descriptors) -> None:
    inbox = Inbox(channel)
    runner.while_waiting(lambda: _serve_hand_overs(core, inbox, channel))
    _announce(runner, core, channel, descriptors)
    while True:
        is_readable, was_told = inbox.is_readable(_patience(core)), False
        awake = clock.now()
        last_intake = awake + (INTAKE_SECONDS if core.in_flight else IDLE_INTAKE_SECONDS)
        while is_readable:
            command = inbox.receive()
            core.handle(command)
            was_told |= not isinstance(command, DeviceCommand)  # those only begin something, or are refused
            is_readable = clock.now() < last_intake and inbox.is_readable(0.0)
        core.look()
        if core.has_news and not was_told:  # who waits for a copy waits for nothing else
            channel.send(core.news())
        core.admit()
        if was_told or core.has_news:
            channel.send(core.report())
        if core.run():
            channel.send(core.report())
        core.add_busy(clock.now() - awake)


def _patience(core: EngineCore) -> float | None:
    """How long to wait for a command; None: for ever."""
    if core.has_work:
        return 0.0
    within = core.access.look_within
    return core.idle_seconds() if within is None else within


def _serve_hand_overs(core: EngineCore, inbox: Inbox, channel: SyncChannel) -> None:
    """While a step is computed: begin and end copies, and tell of blocks that it has filled. None waits for its end."""
    for command in inbox.urgent():
        core.handle(command)
    core.look()
    if core.has_news:
        channel.send(core.news())


def _announce(runner: Runner, core: EngineCore, channel: SyncChannel, descriptors: Descriptors) -> None:
    memory = runner.memory
    if memory is not None:
        try:
            descriptors.send(memory.fd)
        except OSError as error:
            raise ChannelClosed("the front has gone") from error
    copies = runner.copies
    pool, links = (None, False) if copies is None else (copies.pool, copies.communicators is not None)
    channel.send(Ready(runner.card, core.stats, memory is not None, pool, links))


def fake_runner(config: EngineConfig) -> FakeRunner:
    """The engine that ``model = "fake"`` names, with a pool as large as the configuration says."""
    card = fake_card(model=config.served_name or "fake", block_size=config.block_size)
    blocks = config.kv_blocks or (config.kv_cache_mb << 20) // card.format.block_bytes
    if blocks < 1:
        raise ConfigError(f"engine.kv_cache_mb must hold at least one block, got {config.kv_cache_mb}")
    try:
        memory = shared_pool_memory(blocks, card.format)
        on_device = config.fake_pool == "device"
        shared, device = (None, memory) if on_device else (memory, None)
        return FakeRunner(card, blocks, step_seconds=config.fake_step_ms / 1000, memory=shared, device=device)
    except (MemoryError, OverflowError) as error:
        raise ConfigError(
            f"engine.kv_cache_mb (or engine.kv_blocks): must fit the memory of this machine, got {blocks} blocks"
        ) from error


def plain_drafter(config: EngineConfig) -> Drafter:
    """The drafter of an engine that drafts without a model, or not at all."""
    return NgramDrafter() if config.speculation == "ngram" else NoDrafts()


@contextmanager
def loaded(config: EngineConfig, report: Callable[[str], None]) -> Iterator[tuple[Runner, Drafter]]:
    """The runner, and the drafter for it; every runner is closed at the end.

    A model that drafts comes first: on a GPU the other one takes the memory that is left.
    """
    with ExitStack() as resources:
        if config.speculation == "model":
            draft_runner = resources.enter_context(closing(load_runner(draft_config(config), report)))
            runner = resources.enter_context(closing(load_runner(config, report)))
            drafter = ModelDrafter(draft_runner, runner.card, config)
        else:
            runner = resources.enter_context(closing(load_runner(config, report)))
            drafter = plain_drafter(config)
        gc.freeze()  # what loading has made stays to the end: no collection between steps need look through it
        yield runner, drafter


def draft_config(config: EngineConfig) -> EngineConfig:
    """The settings of the engine's own kind for the model that drafts: its weights and KV as they come."""
    return replace(
        config,
        model=config.draft_model,
        served_name="",
        weight_format="auto",
        kv_format="auto",
        kv_cache_mb=config.draft_kv_cache_mb,
        kv_blocks=0,
        max_running=config.speculation_max_rows,
        speculation="off",
        draft_model="",
    )


def load_runner(config: EngineConfig, report: Callable[[str], None]) -> Runner:
    if config.model == "fake":
        return fake_runner(config)
    report(f"loading {config.model}")
    from baton.engine.load import build_runner  # pulls in torch

    return build_runner(config)


def _prepare_threads(config: EngineConfig) -> None:
    """Read by OpenMP and NCCL when torch is loaded.

    Idle OpenMP threads must not spin: they would starve the other worker.
    """
    os.environ["GOMP_SPINCOUNT"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast: two ranks have no use for it, and it can hang a host


def main() -> None:
    options = argparse.ArgumentParser(prog="baton.engine.process")
    options.add_argument("--fd", type=int, required=True, help="file descriptor of the channel to the front")
    options.add_argument("--descriptors", type=int, required=True, help="file descriptor of the socket for others")
    options.add_argument("--parent", type=int, required=True, help="process id of the front")
    arguments = options.parse_args()
    die_with_parent(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the front drains, then hangs up
        signal.signal(number, signal.SIG_IGN)
    channel = SyncChannel(socket.socket(fileno=arguments.fd))
    descriptors = Descriptors(socket.socket(fileno=arguments.descriptors))
    try:
        load = channel.receive()
        assert isinstance(load, Load)
        _prepare_threads(load.config)
        _run(load.config, channel, descriptors)
    except ChannelClosed:
        return
    finally:
        channel.close()


def _run(config: EngineConfig, channel: SyncChannel, descriptors: Descriptors) -> None:
    with ExitStack() as resources:
        try:
            engine = resources.enter_context(loaded(config, lambda message: channel.send(Loading(message))))
        except BatonError as error:
            channel.send(LoadFailed(error))
            return
        serve(*engine, config, channel, SystemClock(), descriptors)


if __name__ == "__main__":
    main()
