"""The nouns of Baton. Frozen, validated where they enter the system, the same in every process."""

from __future__ import annotations

from baton.core.types.calls import (
    DecodeRequest,
    PrefillRequest,
    PrefillResult,
)
from baton.core.types.door import (
    ChatMessage,
    GenerateChunk,
    GenerateRequest,
    ModelInfo,
    Principal,
)
from baton.core.types.fleet import (
    Candidate,
    EngineStats,
    ModelCard,
    Module,
    Plan,
    PlanLimits,
    PlanQuery,
    ProcessRecord,
    Role,
    WorkerState,
)
from baton.core.types.tenancy import Tier
from baton.core.types.tokens import (
    Attempt,
    CacheClass,
    CachePolicy,
    FinishReason,
    FirstToken,
    Placement,
    PrefillMode,
    Sampling,
    StopRules,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from baton.core.types.transfer import (
    FilledBlocks,
    KvChunk,
    KvConfirmation,
    KvFormat,
    KvHandshake,
    Ticket,
)

__all__ = [
    "Attempt",
    "CacheClass",
    "CachePolicy",
    "Candidate",
    "ChatMessage",
    "DecodeRequest",
    "EngineStats",
    "FilledBlocks",
    "FinishReason",
    "FirstToken",
    "GenerateChunk",
    "GenerateRequest",
    "KvChunk",
    "KvConfirmation",
    "KvFormat",
    "KvHandshake",
    "ModelCard",
    "ModelInfo",
    "Module",
    "Placement",
    "Plan",
    "PlanLimits",
    "PlanQuery",
    "PrefillMode",
    "PrefillRequest",
    "PrefillResult",
    "Principal",
    "ProcessRecord",
    "Role",
    "Sampling",
    "StopRules",
    "Ticket",
    "Tier",
    "TokenChunk",
    "TokenLogprob",
    "TokenRequest",
    "Usage",
    "WorkerState",
]
