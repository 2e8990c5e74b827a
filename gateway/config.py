"""Settings of the gateway (section ``gateway``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.core.config import secret
from baton.core.errors import ConfigError
from gateway.relay import RelayPolicy
from gateway.validate import Limits

WIRE_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """``tokenizers`` are ``NAME=DIRECTORY`` entries; a served model without one takes and returns token ids only.

    ``planner_address`` empty: the planner is found in the registry. ``default_model`` empty: a request must name its
    model unless the fleet serves only one. Durations carry their unit in the name.
    """

    host: str = "127.0.0.1"
    port: int = 8600
    http_host: str = "127.0.0.1"
    http_port: int = 0
    keys_file: Path = Path("keys.toml")
    service_token: str = secret()
    planner_address: str = ""
    tokenizers: tuple[str, ...] = ()
    default_model: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""

    planner_budget_ms: float = 20.0
    fleet_poll_ms: float = 200.0
    max_lost_workers: int = 4  # of one choice; then it ends with PeerUnavailable
    recovery_patience_seconds: float = 5.0  # how long a started answer waits for a worker to continue on
    down_seconds: float = 2.0  # how long a worker that failed a request is avoided by new ones
    client_stall_seconds: float = 20.0  # a client that reads nothing for so long is cancelled
    drain_seconds: float = 60.0
    default_timeout_seconds: float = 600.0  # of a call that brings no deadline

    default_max_tokens: int = 1024
    max_choices: int = 16
    max_logprobs: int = 20
    max_prompt_bytes: int = 4 * 1024 * 1024
    max_messages: int = 4096
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024

    def __post_init__(self) -> None:
        for name in ("planner_budget_ms", "fleet_poll_ms", "client_stall_seconds", "default_timeout_seconds"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        for name in ("max_lost_workers", "recovery_patience_seconds", "down_seconds", "drain_seconds", "max_logprobs"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must be at least 0")
        for name in ("default_max_tokens", "max_choices", "max_prompt_bytes", "max_messages"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        below_wire = f"must be below the wire's {WIRE_LIMIT_BYTES}"
        _require(self.max_prompt_bytes < WIRE_LIMIT_BYTES, "max_prompt_bytes", self.max_prompt_bytes, below_wire)
        both = bool(self.tls_certificate) == bool(self.tls_key)
        _require(both, "tls_key", self.tls_key, "tls_certificate and tls_key go together")

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
    def relay(self) -> RelayPolicy:
        return RelayPolicy(lost_workers=self.max_lost_workers, patience=self.recovery_patience_seconds)

    def tokenizer_directories(self) -> dict[str, Path]:
        """Model name to directory. Raises ConfigError for an entry of another form."""
        found: dict[str, Path] = {}
        for entry in self.tokenizers:
            name, equals, directory = entry.partition("=")
            _require(bool(name and equals and directory), "tokenizers", entry, "entries have the form NAME=DIRECTORY")
            found[name] = Path(directory)
        return found


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"gateway.{key}: {rule}, got {value}")
