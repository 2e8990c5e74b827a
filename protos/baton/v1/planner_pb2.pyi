from protos.baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanRequest(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "prompt_tokens", "max_tokens", "hop", "priority", "avoid", "attention_window", "tier", "pool", "tenant_max_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENANT_MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    hop: int
    priority: int
    avoid: _containers.RepeatedScalarFieldContainer[str]
    attention_window: int
    tier: _types_pb2.Tier
    pool: str
    tenant_max_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., hop: _Optional[int] = ..., priority: _Optional[int] = ..., avoid: _Optional[_Iterable[str]] = ..., attention_window: _Optional[int] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., pool: _Optional[str] = ..., tenant_max_blocks: _Optional[int] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("decode", "prefill", "local_prefill_max_tokens", "reasons", "speculation", "attention_window", "limits", "cache", "prefill_wait")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_FIELD_NUMBER: _ClassVar[int]
    decode: _containers.RepeatedCompositeFieldContainer[_types_pb2.Candidate]
    prefill: _containers.RepeatedCompositeFieldContainer[_types_pb2.Candidate]
    local_prefill_max_tokens: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    speculation: bool
    attention_window: int
    limits: PlanLimits
    cache: _types_pb2.CachePolicy
    prefill_wait: float
    def __init__(self, decode: _Optional[_Iterable[_Union[_types_pb2.Candidate, _Mapping]]] = ..., prefill: _Optional[_Iterable[_Union[_types_pb2.Candidate, _Mapping]]] = ..., local_prefill_max_tokens: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., speculation: _Optional[bool] = ..., attention_window: _Optional[int] = ..., limits: _Optional[_Union[PlanLimits, _Mapping]] = ..., cache: _Optional[_Union[_types_pb2.CachePolicy, _Mapping]] = ..., prefill_wait: _Optional[float] = ...) -> None: ...

class PlanLimits(_message.Message):
    __slots__ = ("max_tokens", "max_chunk_tokens", "seconds")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    max_chunk_tokens: int
    seconds: float
    def __init__(self, max_tokens: _Optional[int] = ..., max_chunk_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
