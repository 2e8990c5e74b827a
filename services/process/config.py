"""What the sections of all services have in common: where to listen, how to prove who one is, how to end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from baton.core.config import secret
from baton.core.errors import ConfigError
from baton.core.pools import LABEL
from baton.core.types import ProcessRecord
from baton.rpc.channels import ClientSecurity, ClientTls
from baton.rpc.serving import ServerPolicy, ServerTls


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """``advertise_host``: how others reach this host, where that is not ``host`` (0.0.0.0, say). Ports 0: any free.

    ``service_token`` is shared by all services; a caller without it is refused. With TLS, ``tls_ca`` is the authority
    that signed every service's certificate.
    """

    SECTION: ClassVar[str] = "process"

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    http_host: str = "127.0.0.1"
    http_port: int = 0
    service_token: str = secret()
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    heartbeat_seconds: float = 0.25
    drain_seconds: float = 60.0  # for running requests, after SIGTERM

    def __post_init__(self) -> None:
        self.require(self.heartbeat_seconds > 0, "heartbeat_seconds", "must be positive")
        self.require(self.drain_seconds >= 0, "drain_seconds", "must not be negative")
        for key in ("port", "http_port"):
            self.require(0 <= getattr(self, key) <= 65535, key, "must be between 0 and 65535")
        given = [bool(self.tls_certificate), bool(self.tls_key), bool(self.tls_ca)]
        self.require(all(given) or not any(given), "tls_ca", "goes with tls_certificate and tls_key, all or none")

    def require(self, holds: bool, key: str, rule: str) -> None:
        """ConfigError, naming section, key and value, unless ``holds``."""
        if not holds:
            raise ConfigError(f"{self.SECTION}.{key} {rule}, got {getattr(self, key)!r}")

    def described(self, record: ProcessRecord) -> ProcessRecord:
        """The record with what others must know of these settings."""
        return record

    def server_policy(self) -> ServerPolicy:
        tls = None
        if self.tls_certificate:
            tls = ServerTls(Path(self.tls_certificate), Path(self.tls_key), Path(self.tls_ca))
        return ServerPolicy(token=self.service_token, tls=tls, drain=self.drain_seconds)

    def client_security(self) -> ClientSecurity:
        tls = None
        if self.tls_ca:
            tls = ClientTls(Path(self.tls_ca), Path(self.tls_certificate), Path(self.tls_key))
        return ClientSecurity(self.service_token, tls)


@dataclass(frozen=True, slots=True)
class WorkerConfig(ProcessConfig):
    """Of prefill and decode workers. ``engine_stall_seconds``: an engine that has work and ends no step for so long
    hangs, and its worker ends; above the longest step (a chunk of a prompt on a slow machine). ``gpus``: where
    `baton up` places workers of this role, in turn, by CUDA's index or UUID; empty: all GPUs of the stack in turn.
    ``labels``: pools that the worker belongs to; those that ``planner.pools`` names are kept for their tenants."""

    engine_stall_seconds: float = 30.0
    gpus: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        self.require(self.engine_stall_seconds > 0, "engine_stall_seconds", "must be positive")
        well_formed = all(LABEL.fullmatch(label) for label in self.labels)
        self.require(well_formed, "labels", f"must hold labels of the form {LABEL.pattern}")

    def described(self, record: ProcessRecord) -> ProcessRecord:
        return replace(record, labels=self.labels)
