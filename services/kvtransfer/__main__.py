"""The peer directory and block catalogue: ``python -m services.kvtransfer --id NAME``."""

from typing import NoReturn

from baton.core.arguments import Arguments
from baton.core.background import background
from baton.core.config import Section
from baton.core.types import Role
from baton.rpc.directory import directory_service
from baton.state.config import StateConfig
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.directory import Directory
from services.process.main import run_service
from services.process.process import ServiceProcess, service_process

KVTRANSFER = Section("kvtransfer", KvTransferConfig)
STATE = Section("state", StateConfig)


async def serve(arguments: Arguments) -> None:
    config, state = arguments.settings.fill(KVTRANSFER), arguments.settings.fill(STATE)
    async with service_process(arguments.id, Role.KVTRANSFER, config, state) as process:
        directory = Directory(
            process.clock, max_blocks=config.catalogue_blocks, peer_lease_seconds=config.peer_lease_seconds
        )
        reporting = background(_report(process, directory), "catalogue series")
        async with reporting, process.serving([directory_service(directory)]):
            await process.stopping.wait()


async def _report(process: ServiceProcess, directory: Directory) -> NoReturn:
    blocks = process.meter.gauge("catalogue_blocks", "Block hashes kept, of all workers together")
    peers = process.meter.gauge("catalogue_peers", "Workers that announced themselves within the lease")
    while True:
        peers.set(len(await directory.peers()))
        blocks.set(directory.blocks)
        await process.clock.sleep(process.config.heartbeat_seconds)


if __name__ == "__main__":
    run_service("services.kvtransfer", (KVTRANSFER, STATE), serve)
