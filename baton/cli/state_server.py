"""The Redis of a local stack: the user's own where ``state.url`` is set, else an embedded server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from baton.cli.children import REDIS_ID
from baton.cli.state_dir import LaunchedProcess, StateDir
from baton.core.config import Section, Settings
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server

PATIENT_MS = 1000.0  # the launcher has time


@dataclass(frozen=True, slots=True)
class StateServer:
    """``settings`` and ``secrets`` are what services need beside the user's settings to reach it.

    ``process`` is None for a server that others run.
    """

    config: StateConfig
    settings: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()
    process: LaunchedProcess | None = None


@contextmanager
def state_server(settings: Settings, state_dir: StateDir) -> Iterator[StateServer]:
    """An embedded server lives as long as the block. ConfigError when it cannot start."""
    config = replace(settings.fill(Section("state", StateConfig)), timeout_ms=PATIENT_MS)
    if settings.last("state", "url"):
        yield StateServer(config)
        return
    password = config.password or secrets.token_hex(16)
    with state_dir.new_log(REDIS_ID) as log, embedded_server(password, log) as (url, pid):
        yield StateServer(
            replace(config, url=url, password=password),
            (f"state.url={url}",),
            (("BATON_STATE__PASSWORD", password),),
            LaunchedProcess("redis", REDIS_ID, pid, log.name, url.partition("://")[2].partition("/")[0]),
        )
