"""Settings of one inference engine (section ``engine``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.types import Tier
from baton.engine.tiers import DEFAULT_TIERS, TierPolicy, parse_tiers

# Where the defaults below, which suit a CPU, do not suit a GPU.
CUDA_DEFAULTS: Mapping[str, float] = {
    "max_step_tokens": 8192,
    "max_running": 512,
    "max_waiting": 1024,
    "kv_cache_mb": 0,
    "tpot_target_ms": 20.0,
}


def device_defaults(given: Mapping[str, object]) -> Mapping[str, object]:
    """The defaults that follow from ``given["device"]`` and differ from those of ``EngineConfig``."""
    return CUDA_DEFAULTS if given.get("device") == "cuda" else {}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``model``: ``fake``, a Hugging Face directory or ``random:CONFIG``; ``served_name`` is what clients call it.

    ``backend`` auto means native on a CPU that can build it, else torch; on a GPU it means cuda, which computes in
    bfloat16 only; torch is the reference on both devices.
    """

    model: str = "fake"
    served_name: str = ""
    dtype: str = "bfloat16"  # float32 | bfloat16
    weight_format: str = "auto"  # auto, which is dtype, | fp8, on a GPU: e4m3 with a scale for every output channel
    kv_format: str = "auto"  # auto, which is dtype, | fp8, on a GPU: e4m3, twice the tokens in the same memory
    device: str = "cpu"  # cpu | cuda
    backend: str = "auto"  # auto | native | torch | cuda
    threads: int = 2
    block_size: int = 16
    kv_cache_mb: int = 256  # 0, on a GPU: what gpu_memory_share leaves beside weights, buffers and captured graphs
    kv_blocks: int = 0  # 0: as many as fit kv_cache_mb
    max_step_tokens: int = 512  # new tokens computed in one step, prefill chunks included
    tpot_target_ms: float = 0.0  # how short a step of answers is kept when it takes prompts along; 0: as long as it is
    max_running: int = 64  # sequences in one step
    max_waiting: int = 256  # bounded queue before admission; full means Overloaded
    growth_window: int = 256  # output tokens whose blocks are reserved at admission
    tiers: tuple[str, ...] = DEFAULT_TIERS  # TIER=WEIGHT:RESERVED:BOUND, see TierPolicy
    # A tier that nobody has used for so long reserves nothing of what could not be taken back at once.
    reserve_idle_seconds: float = 10.0
    tenant_block_share: float = 1.0  # of the pool, that one tenant may hold; one request alone always fits
    prompt_token_weight: float = 1.0  # what a tenant is charged for a prompt token that is computed
    output_token_weight: float = 2.0  # and for a token that is drawn
    cache_keep_share: float = 0.25  # of the pool, that blocks of class keep may fill when nobody uses them; 0: none
    gpu_memory_share: float = 0.9  # of the GPU's memory that may be in use, by this engine and others together
    kernel_cache: str = "~/.cache/baton"  # GPU kernels that were compiled, products that were measured
    speculation: str = (
        "off"  # off | ngram: drafts are looked up in prompt and answer | model: draft_model proposes them
    )
    draft_tokens: int = 7  # drafts that follow a token at most
    speculation_max_rows: int = 32  # rows of a step that has drafts, themselves included; more sequences have none
    draft_model: str = ""  # as model, of the same vocabulary
    draft_kv_cache_mb: int = 256
    seed: int = 0  # of random weights
    fake_step_ms: float = 0.0  # how long a step of the model "fake" takes
    fake_pool: str = "shared"  # shared | device: of the model "fake", as if it were in a GPU's memory

    def __post_init__(self) -> None:
        self._require(self.dtype in ("float32", "bfloat16"), "dtype", "must be float32 or bfloat16")
        self._require(self.device in ("cpu", "cuda"), "device", "must be cpu or cuda")
        backends = ("auto", "native", "torch") if self.device == "cpu" else ("auto", "torch", "cuda")
        known = ", ".join(backends[:-1]) + f" or {backends[-1]}"
        self._require(self.backend in backends, "backend", f"must be {known} on {self.device}")
        if self.device == "cuda" and self.backend != "torch":
            self._require(self.dtype == "bfloat16", "dtype", "must be bfloat16 on cuda, except with backend torch")
        for key in ("weight_format", "kv_format"):
            self._require(getattr(self, key) in ("auto", "fp8"), key, "must be auto or fp8")
            own_kernels = self.device == "cuda" and self.backend != "torch"
            self._require(getattr(self, key) == "auto" or own_kernels, key, "must be auto except on backend cuda")
        self._require(0 < self.gpu_memory_share <= 1, "gpu_memory_share", "must be above 0 and at most 1")
        self._require(0 <= self.cache_keep_share <= 1, "cache_keep_share", "must be from 0 to 1")
        size = self.block_size
        self._require(
            1 <= size <= 1024 and not size & (size - 1), "block_size", "must be a power of two from 1 to 1024"
        )
        self._check_speculation()
        self._require(self.fake_pool in ("shared", "device"), "fake_pool", "must be shared or device")
        for key in ("threads", "max_step_tokens", "max_running", "max_waiting"):
            self._require(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("kv_cache_mb", "kv_blocks", "growth_window", "fake_step_ms", "tpot_target_ms"):
            self._require(getattr(self, key) >= 0, key, "must not be negative")
        self._check_shares()

    def tier_policies(self) -> dict[Tier, TierPolicy]:
        """Parsed ``tiers``."""
        return parse_tiers(self.tiers)

    def _check_shares(self) -> None:
        self.tier_policies()
        self._require(0 < self.tenant_block_share <= 1, "tenant_block_share", "must be above 0 and at most 1")
        self._require(self.reserve_idle_seconds >= 0, "reserve_idle_seconds", "must not be negative")
        for key in ("prompt_token_weight", "output_token_weight"):
            self._require(0 < getattr(self, key) < float("inf"), key, "must be above 0 and finite")

    def _check_speculation(self) -> None:
        self._require(self.speculation in ("off", "ngram", "model"), "speculation", "must be off, ngram or model")
        self._require(1 <= self.draft_tokens <= 64, "draft_tokens", "must be from 1 to 64")
        self._require(self.speculation_max_rows >= 2, "speculation_max_rows", "must be at least 2: a row and a draft")
        self._require(self.draft_kv_cache_mb >= 1, "draft_kv_cache_mb", "must be at least 1")
        named, wanted = bool(self.draft_model), self.speculation == "model"
        limit = "must name a model" if wanted else "must be empty"
        self._require(named == wanted, "draft_model", f"{limit} with engine.speculation {self.speculation}")

    def _require(self, holds: bool, key: str, limit: str) -> None:
        if not holds:
            raise ConfigError(f"engine.{key} {limit}, got {getattr(self, key)!r}")
