from protos.baton.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("tokens", "ticket", "skip_blocks", "max_wait")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    tokens: _types_pb2.TokenRequest
    ticket: _types_pb2.Ticket
    skip_blocks: int
    max_wait: float
    def __init__(self, tokens: _Optional[_Union[_types_pb2.TokenRequest, _Mapping]] = ..., ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., skip_blocks: _Optional[int] = ..., max_wait: _Optional[float] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first", "worker_id", "kv_bytes")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    first: _types_pb2.FirstToken
    worker_id: str
    kv_bytes: int
    def __init__(self, first: _Optional[_Union[_types_pb2.FirstToken, _Mapping]] = ..., worker_id: _Optional[str] = ..., kv_bytes: _Optional[int] = ...) -> None: ...
