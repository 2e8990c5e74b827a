"""The peer directory and block catalogue: ``python -m services.kvtransfer --id NAME``."""

from baton.core.arguments import Arguments
from baton.core.config import Section
from baton.core.types import Role
from baton.rpc.directory import directory_service
from baton.state.config import StateConfig
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.directory import Directory
from services.process.main import run_service
from services.process.process import service_process

KVTRANSFER = Section("kvtransfer", KvTransferConfig)
STATE = Section("state", StateConfig)


async def serve(arguments: Arguments) -> None:
    config, state = arguments.settings.fill(KVTRANSFER), arguments.settings.fill(STATE)
    async with service_process(arguments.id, Role.KVTRANSFER, config, state) as process:
        directory = Directory(
            process.clock, max_blocks=config.catalogue_blocks, peer_lease_seconds=config.peer_lease_seconds
        )
        async with process.serving([directory_service(directory)]):
            await process.stopping.wait()


if __name__ == "__main__":
    run_service("services.kvtransfer", (KVTRANSFER, STATE), serve)
