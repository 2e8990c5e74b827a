"""A prefill worker: ``python -m services.prefill --id NAME``."""

from baton.core.config import Section
from baton.core.types import Role
from services.prefill.config import PrefillConfig
from services.worker.main import main

if __name__ == "__main__":
    main(Role.PREFILL, Section("prefill", PrefillConfig))
