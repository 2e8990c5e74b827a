from protos.baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "open", "cancel", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    open: OpenRequest
    cancel: CancelRequest
    heartbeat: LinkHeartbeat
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[LinkHeartbeat, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("session_id", "gateway_id", "protocol_version", "features")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    gateway_id: str
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("stream", "tokens", "prefill", "local_prefill_max_tokens", "traceparent", "prefill_wait")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_FIELD_NUMBER: _ClassVar[int]
    stream: int
    tokens: _types_pb2.TokenRequest
    prefill: _containers.RepeatedCompositeFieldContainer[_types_pb2.Candidate]
    local_prefill_max_tokens: int
    traceparent: str
    prefill_wait: float
    def __init__(self, stream: _Optional[int] = ..., tokens: _Optional[_Union[_types_pb2.TokenRequest, _Mapping]] = ..., prefill: _Optional[_Iterable[_Union[_types_pb2.Candidate, _Mapping]]] = ..., local_prefill_max_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., prefill_wait: _Optional[float] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: int
    def __init__(self, stream: _Optional[int] = ...) -> None: ...

class LinkHeartbeat(_message.Message):
    __slots__ = ("step", "unfinished")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    step: int
    unfinished: int
    def __init__(self, step: _Optional[int] = ..., unfinished: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "chunks", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: LinkWelcome
    chunks: _containers.RepeatedCompositeFieldContainer[StreamChunk]
    heartbeat: LinkHeartbeat
    def __init__(self, welcome: _Optional[_Union[LinkWelcome, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[StreamChunk, _Mapping]]] = ..., heartbeat: _Optional[_Union[LinkHeartbeat, _Mapping]] = ...) -> None: ...

class LinkWelcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "protocol_version", "features")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamChunk(_message.Message):
    __slots__ = ("stream", "token_ids", "logprobs", "prompt_logprobs", "finish", "usage", "placement", "error", "last")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    stream: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    finish: _types_pb2.FinishReason
    usage: _types_pb2.Usage
    placement: _types_pb2.Placement
    error: _types_pb2.ErrorDetail
    last: bool
    def __init__(self, stream: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., placement: _Optional[_Union[_types_pb2.Placement, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., last: _Optional[bool] = ...) -> None: ...
