"""Peer directory, block catalogue and cache tier: ``python -m services.kvtransfer --id NAME``."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

from baton.core.arguments import Arguments
from baton.core.background import background
from baton.core.config import Section
from baton.core.errors import ConfigError
from baton.core.memory import keep_large_buffers
from baton.core.types import Role
from baton.rpc.directory import directory_service
from baton.rpc.tier import WarmClient, tier_service, warm_service
from baton.state.config import StateConfig
from services.kvtransfer.block_files import BlockFiles
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.directory import Directory
from services.kvtransfer.disk import DiskLevel
from services.kvtransfer.tier import Tier
from services.kvtransfer.tier_series import TierSeries
from services.kvtransfer.warm import FleetWarmer
from services.process.main import run_service
from services.process.process import ServiceProcess, service_process

KVTRANSFER = Section("kvtransfer", KvTransferConfig)
STATE = Section("state", StateConfig)


async def serve(arguments: Arguments) -> None:
    config, state = arguments.settings.fill(KVTRANSFER), arguments.settings.fill(STATE)
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(service_process(arguments.id, Role.KVTRANSFER, config, state))
        directory = Directory(
            process.clock, max_blocks=config.catalogue_blocks, peer_lease_seconds=config.peer_lease_seconds
        )
        tier = _tier(process, config)
        await stack.enter_async_context(tier.opened())
        process.registration.describe_tier(lambda: tier.stats)
        await stack.enter_async_context(background(_report(process, directory, tier), "catalogue and tier series"))
        warmer = FleetWarmer(process.registry, lambda at: WarmClient(process.channels.get(at)), tier)
        services = [directory_service(directory), tier_service(tier), warm_service(warmer)]
        async with process.serving(services):
            await process.stopping.wait()


def _tier(process: ServiceProcess, config: KvTransferConfig) -> Tier:
    return Tier(
        memory_bytes=config.tier_memory_mb << 20,
        disk=_disk(process, config),
        message_bytes=config.tier_message_bytes,
        pinned_share=config.tier_pinned_share,
        epoch=process.epoch,
    )


def _disk(process: ServiceProcess, config: KvTransferConfig) -> DiskLevel | None:
    if not config.tier_directory or not config.tier_disk_mb:
        return None
    directory = Path(config.tier_directory).expanduser() / process.id
    try:
        files = BlockFiles(directory)
    except OSError as error:
        raise ConfigError(
            f"kvtransfer.tier_directory must be a directory to write to, got {directory}: {error}"
        ) from error
    return DiskLevel(files, config.tier_disk_mb << 20, process.clock)


async def _report(process: ServiceProcess, directory: Directory, tier: Tier) -> NoReturn:
    blocks = process.meter.gauge("catalogue_blocks", "Block hashes kept, of all workers together")
    peers = process.meter.gauge("catalogue_peers", "Workers that announced themselves within the lease")
    series = TierSeries(process.meter)
    while True:
        peers.set(len(await directory.peers()))
        blocks.set(directory.blocks)
        series.update(tier.stats)
        await process.clock.sleep(process.config.heartbeat_seconds)


if __name__ == "__main__":
    keep_large_buffers()  # KV passes through this process in messages of megabytes
    run_service("services.kvtransfer", (KVTRANSFER, STATE), serve)
