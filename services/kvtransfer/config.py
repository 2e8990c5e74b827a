"""Settings of the KV hand-over and of the kvtransfer process (section ``kvtransfer``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from baton.engine.device_copies import SLOT_BYTES
from services.kvtransfer.transport import TransportName
from services.process.config import ProcessConfig


class ChecksumPolicy(StrEnum):
    """``full``: verified as received and again as stored. ``off``: the sender computes none, the receiver asks none."""

    FULL = "full"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class KvTransferConfig(ProcessConfig):
    """Workers read the hand-over's part of this section, the kvtransfer process the directory's, both the tier's."""

    SECTION: ClassVar[str] = "kvtransfer"

    transports: tuple[str, ...] = ("cuda-ipc", "nccl", "shm", "tcp")  # that may be used, where both workers have them
    local_calls: bool = True  # on one host offers are packets over a local socket; else gRPC calls, which proxies see
    transport_rest_seconds: float = 30.0  # how long one that failed towards a peer is left alone
    checksums: str = "full"  # full | off
    max_message_bytes: int = 8 * 1024 * 1024  # of one offer in one message; at least one block is always sent
    max_mapped_bytes: int = 64 * 1024 * 1024  # of one offer whose bytes are in mapped memory, or streamed out of it
    max_device_bytes: int = 512 * 1024 * 1024  # of one offer whose bytes are in a mapped GPU's memory
    max_link_bytes: int = SLOT_BYTES  # of one offer whose bytes come over NCCL
    offers_in_flight: int = 3  # of one request
    acknowledge_seconds: float = 10.0  # a receiver that is silent for longer counts as lost
    peer_rest_seconds: float = 1.0  # how long a lost peer is left alone
    catalogue_blocks: int = 1_000_000  # block hashes kept by the directory, all workers together
    peer_lease_seconds: float = 10.0  # a peer that did not announce itself for longer is forgotten

    # The cache tier, in the kvtransfer process.
    tier_memory_mb: int = 256
    tier_directory: str = ""  # empty: no disk; each process has a directory of its own in it
    tier_disk_mb: int = 2048
    tier_pinned_share: float = 0.5  # of the memory (of the disk, without any) that pinned blocks may take

    # The cache tier, as workers use it.
    tier_message_bytes: int = 2 * 1024 * 1024  # of one answer; at least one block
    tier_answer_seconds: float = 0.5  # a tier silent for longer is left alone for peer_rest_seconds
    tier_min_tokens: int = 64  # shorter prefixes are computed
    # Until this worker has seen some itself. Measured with smollm2 on two cores: bench.tier, the machine busy with much
    # else; bench/results/cpu_speed.json.
    tier_mb_per_second: float = 100.0  # of a fetch
    tier_prefill_tokens_per_second: float = 1500.0  # of computing
    tier_offload_mb_per_second: float = 100.0  # of each worker while it is idle; 0: it sends nothing
    tier_offload_wait_seconds: float = 5.0  # that blocks wait for an engine that has nothing to do
    tier_offload_busy_mb_per_second: float = 5.0  # of those that have waited so long
    tier_offload_blocks: int = 4096  # that may wait to be sent

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        policies = [policy.value for policy in ChecksumPolicy]
        self.require(self.checksums in policies, "checksums", f"must be one of {', '.join(policies)}")
        known = [name.value for name in TransportName]
        named = set(self.transports)
        self.require(named <= set(known) and bool(named), "transports", f"must be some of {', '.join(known)}")
        for key in (
            "max_message_bytes",
            "max_mapped_bytes",
            "max_device_bytes",
            "max_link_bytes",
            "offers_in_flight",
            "catalogue_blocks",
            "tier_message_bytes",
            "tier_min_tokens",
            "tier_offload_blocks",
        ):
            self.require(getattr(self, key) >= 1, key, "must be at least 1")
        self.require(self.max_link_bytes <= SLOT_BYTES, "max_link_bytes", f"must be at most {SLOT_BYTES}")
        for key in ("tier_memory_mb", "tier_disk_mb", "tier_offload_mb_per_second"):
            self.require(getattr(self, key) >= 0, key, "must not be negative")
        self.require(0 <= self.tier_pinned_share <= 1, "tier_pinned_share", "must be between 0 and 1")
        for key in (
            "acknowledge_seconds",
            "transport_rest_seconds",
            "peer_lease_seconds",
            "tier_answer_seconds",
            "tier_mb_per_second",
            "tier_offload_wait_seconds",
            "tier_offload_busy_mb_per_second",
            "tier_prefill_tokens_per_second",
        ):
            self.require(getattr(self, key) > 0, key, "must be positive")

    def most_bytes(self, transport: TransportName) -> int:
        """Of one offer by ``transport``."""
        match transport:
            case TransportName.CUDA_IPC:
                return self.max_device_bytes
            case TransportName.NCCL:
                return self.max_link_bytes
            case TransportName.SHM:
                return self.max_mapped_bytes
            case TransportName.TCP:
                return self.max_message_bytes

    @property
    def link_seconds(self) -> float:
        """For joining a link, and for each message on it: shorter than what makes a receiver count as lost."""
        return self.acknowledge_seconds / 2

    @property
    def checksum_policy(self) -> ChecksumPolicy:
        return ChecksumPolicy(self.checksums)
