"""A decode worker: ``python -m services.decode --id NAME``."""

from baton.core.config import Section
from baton.core.types import Role
from services.decode.config import DecodeConfig
from services.worker.main import main

if __name__ == "__main__":
    main(Role.DECODE, Section("decode", DecodeConfig))
