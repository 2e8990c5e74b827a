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
    PlanQuery,
    ProcessRecord,
    Role,
    WorkerState,
)
from baton.core.types.tier import TierBlock, TierChanges, TierStats
from baton.core.types.tokens import (
    Attempt,
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
    KvSource,
    LocalDoor,
    Ticket,
)

__all__ = [
    "Attempt",
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
    "KvSource",
    "LocalDoor",
    "ModelCard",
    "ModelInfo",
    "Module",
    "Placement",
    "Plan",
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
    "TierBlock",
    "TierChanges",
    "TierStats",
    "TokenChunk",
    "TokenLogprob",
    "TokenRequest",
    "Usage",
    "WorkerState",
]
