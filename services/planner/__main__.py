"""The planner: ``python -m services.planner --id NAME``."""

from baton.core.arguments import Arguments
from baton.core.config import Section
from baton.core.types import Role
from baton.rpc.planner import planner_service
from baton.state.config import StateConfig
from services.planner.config import PlannerConfig
from services.planner.service import Planner
from services.process.main import run_service
from services.process.process import service_process

PLANNER = Section("planner", PlannerConfig)
STATE = Section("state", StateConfig)


async def serve(arguments: Arguments) -> None:
    config, state = arguments.settings.fill(PLANNER), arguments.settings.fill(STATE)
    async with service_process(arguments.id, Role.PLANNER, config, state) as process:
        planner = Planner(process.registry, config, meter=process.meter, clock=process.clock)
        async with planner.running(), process.serving([planner_service(planner)]):
            await process.stopping.wait()


if __name__ == "__main__":
    run_service("services.planner", (PLANNER, STATE), serve)
