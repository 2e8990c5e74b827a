"""Settings of the gateway (section ``gateway``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.rpc.channels import MAX_MESSAGE_BYTES
from baton.rpc.serving import ServerPolicy, ServerTls
from gateway.admission import AdmissionPolicy
from gateway.ledger_upkeep import LedgerPolicy
from gateway.relay import RelayPolicy
from gateway.service import GatewayPolicy
from gateway.validate import Limits
from services.process.config import ProcessConfig


@dataclass(frozen=True, slots=True)
class GatewayConfig(ProcessConfig):
    """Keys named ``tls_*`` are for the connections to other services; the door has its own certificate, and asks
    callers for one only when ``door_client_ca`` is set.

    ``tokenizers`` are ``NAME=DIRECTORY`` entries; a served model without one takes and returns token ids only.
    ``replicas``: how many gateways share the limits while Redis is away, or more, if more are registered.
    ``quota_lease_seconds``: how long a gateway that died holds what it reserved; its requests are charged what it told
    last, within ``quota_renew_seconds``, unless their clients resume, which charges all. ``delivery_log_directory``:
    where each gateway keeps, in a file of its own, what its streams were delivered since; any gateway of the directory
    tells that of one that was killed. It is local to the machine and outlives the process. Empty: nobody does.
    ``prices_file`` empty: nothing costs anything.
    ``ledger_directory`` empty: the usage ledger stays in Redis, where it grows. One directory is for all gateways that
    name one (or only one of them does): each gateway reads what is in its own.
    ``planner_address`` empty: the planner is found in the registry. ``default_model`` empty: a request must name its
    model unless the fleet serves only one.
    """

    SECTION: ClassVar[str] = "gateway"

    port: int = 8600
    keys_file: Path = Path("keys.toml")
    prices_file: str = ""
    replicas: int = 1
    quota_lease_seconds: float = 15.0
    quota_renew_seconds: float = 1.0
    delivery_log_directory: str = ""
    ledger_directory: str = ""
    ledger_kept_days: int = 40  # in Redis, of what is in the directory; so that any gateway knows this month's usage
    ledger_archive_seconds: float = 300.0
    planner_address: str = ""
    tokenizers: tuple[str, ...] = ()
    default_model: str = ""
    door_certificate: str = ""
    door_key: str = ""
    door_client_ca: str = ""

    planner_budget_ms: float = 20.0
    fleet_poll_ms: float = 200.0
    max_lost_workers: int = 4  # of one choice; then it ends with PeerUnavailable
    recovery_patience_seconds: float = 5.0  # how long a started answer waits for a worker to continue on
    down_seconds: float = 2.0  # how long a worker that failed a request is avoided by new ones
    client_stall_seconds: float = 20.0  # a client that reads nothing for so long is cancelled
    default_timeout_seconds: float = 600.0  # of a call that brings no deadline

    default_max_tokens: int = 1024
    max_choices: int = 16
    max_logprobs: int = 20
    max_prompt_bytes: int = 4 * 1024 * 1024
    max_messages: int = 4096
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        for key in (
            "planner_budget_ms",
            "fleet_poll_ms",
            "client_stall_seconds",
            "default_timeout_seconds",
            "ledger_archive_seconds",
            "quota_lease_seconds",
            "quota_renew_seconds",
        ):
            self.require(getattr(self, key) > 0, key, "must be above 0")
        often = self.quota_renew_seconds <= self.quota_lease_seconds / 3
        self.require(often, "quota_renew_seconds", "must be at most a third of quota_lease_seconds")
        for key in ("max_lost_workers", "recovery_patience_seconds", "down_seconds", "max_logprobs"):
            self.require(getattr(self, key) >= 0, key, "must be at least 0")
        for key in (
            "replicas",
            "ledger_kept_days",
            "default_max_tokens",
            "max_choices",
            "max_prompt_bytes",
            "max_messages",
        ):
            self.require(getattr(self, key) >= 1, key, "must be at least 1")
        below_wire = self.max_prompt_bytes < MAX_MESSAGE_BYTES
        self.require(below_wire, "max_prompt_bytes", f"must be below the wire's {MAX_MESSAGE_BYTES}")
        self.require(bool(self.door_certificate) == bool(self.door_key), "door_key", "goes with door_certificate")
        has_door = bool(self.door_certificate) or not self.door_client_ca
        self.require(has_door, "door_client_ca", "needs door_certificate and door_key")
        self.tokenizer_directories()

    def server_policy(self) -> ServerPolicy:
        """The door's: callers prove themselves by API keys, not by the services' token."""
        tls = None
        if self.door_certificate:
            authority = Path(self.door_client_ca) if self.door_client_ca else None
            tls = ServerTls(Path(self.door_certificate), Path(self.door_key), authority)
        return ServerPolicy(tls=tls, drain=self.drain_seconds)

    @property
    def limits(self) -> Limits:
        return Limits(
            default_max_tokens=self.default_max_tokens,
            choices=self.max_choices,
            logprobs=self.max_logprobs,
            prompt_bytes=self.max_prompt_bytes,
            messages=self.max_messages,
            stop_token_ids=self.max_stop_token_ids,
            logit_bias=self.max_logit_bias,
        )

    @property
    def policy(self) -> GatewayPolicy:
        return GatewayPolicy(self.limits, self.default_timeout_seconds, self.default_model)

    def admission_policy(self, remember_seconds: float) -> AdmissionPolicy:
        """``remember_seconds``: how long Redis knows an ended admission."""
        lease = self.quota_lease_seconds
        return AdmissionPolicy(
            lease_seconds=lease,
            renew_seconds=self.quota_renew_seconds,
            expire_seconds=min(lease, AdmissionPolicy().expire_seconds),
            remember_seconds=remember_seconds,
        )

    @property
    def ledger_policy(self) -> LedgerPolicy:
        return LedgerPolicy(self.ledger_archive_seconds, self.ledger_kept_days)

    @property
    def relay(self) -> RelayPolicy:
        return RelayPolicy(lost_workers=self.max_lost_workers, patience=self.recovery_patience_seconds)

    def tokenizer_directories(self) -> dict[str, Path]:
        """Model name to directory."""
        found: dict[str, Path] = {}
        for entry in self.tokenizers:
            name, _, directory = entry.partition("=")
            self.require(bool(name and directory), "tokenizers", "must hold entries of the form NAME=DIRECTORY")
            found[name] = Path(directory)
        return found
