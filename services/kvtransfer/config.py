"""Settings of the KV hand-over and of the kvtransfer process (section ``kvtransfer``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.core.errors import ConfigError


class ChecksumPolicy(StrEnum):
    """``full``: verified as received and again as stored. ``off``: the sender computes none, the receiver asks none."""

    FULL = "full"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    http_port: int = 0
    checksums: str = "full"  # full | off
    max_message_bytes: int = 8 * 1024 * 1024  # of one offer; at least one block is always sent
    offers_in_flight: int = 3  # of one request
    acknowledge_seconds: float = 10.0  # a receiver silent for longer counts as lost
    peer_rest_seconds: float = 1.0  # how long a lost peer is left alone
    catalogue_blocks: int = 1_000_000  # block hashes kept by the directory, all workers together
    peer_lease_seconds: float = 10.0  # a peer that did not announce itself for longer is forgotten

    def __post_init__(self) -> None:
        policies = [policy.value for policy in ChecksumPolicy]
        if self.checksums not in policies:
            raise ConfigError(f"kvtransfer.checksums must be one of {', '.join(policies)}, got {self.checksums!r}")
        for key in ("max_message_bytes", "offers_in_flight", "catalogue_blocks"):
            if getattr(self, key) < 1:
                raise ConfigError(f"kvtransfer.{key} must be at least 1, got {getattr(self, key)}")

    @property
    def checksum_policy(self) -> ChecksumPolicy:
        return ChecksumPolicy(self.checksums)
