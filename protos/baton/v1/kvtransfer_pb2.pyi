from protos.baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeRequest(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.KvHandshake
    def __init__(self, hello: _Optional[_Union[_types_pb2.KvHandshake, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.KvHandshake
    def __init__(self, hello: _Optional[_Union[_types_pb2.KvHandshake, _Mapping]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("ticket", "first_block", "block_count", "payload", "checksums", "source", "format", "late_checksums")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LATE_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.Ticket
    first_block: int
    block_count: int
    payload: bytes
    checksums: _containers.RepeatedScalarFieldContainer[bytes]
    source: KvSource
    format: _types_pb2.KvFormat
    late_checksums: bytes
    def __init__(self, ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksums: _Optional[_Iterable[bytes]] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ..., format: _Optional[_Union[_types_pb2.KvFormat, _Mapping]] = ..., late_checksums: _Optional[bytes] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("epoch", "blocks", "transport", "link", "number", "invitation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    transport: str
    link: int
    number: int
    invitation: bytes
    def __init__(self, epoch: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., transport: _Optional[str] = ..., link: _Optional[int] = ..., number: _Optional[int] = ..., invitation: _Optional[bytes] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferAllResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("ticket", "first_block", "block_count", "checksums")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.Ticket
    first_block: int
    block_count: int
    checksums: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ticket: _Optional[_Union[_types_pb2.Ticket, _Mapping]] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., checksums: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("peer", "address")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.KvHandshake
    address: str
    def __init__(self, peer: _Optional[_Union[_types_pb2.KvHandshake, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "sequence", "added", "removed")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    sequence: int
    added: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., added: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "sequence", "held")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    sequence: int
    held: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., held: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldersRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HoldersResponse(_message.Message):
    __slots__ = ("leading_blocks",)
    class LeadingBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LEADING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    leading_blocks: _containers.ScalarMap[str, int]
    def __init__(self, leading_blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListPeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPeersResponse(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("handshake", "address")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    handshake: _types_pb2.KvHandshake
    address: str
    def __init__(self, handshake: _Optional[_Union[_types_pb2.KvHandshake, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class TierBlock(_message.Message):
    __slots__ = ("name", "payload", "checksum", "graph_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    GRAPH_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    payload: bytes
    checksum: bytes
    graph_version: str
    def __init__(self, name: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[bytes] = ..., graph_version: _Optional[str] = ...) -> None: ...

class ChangesRequest(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class ChangesResponse(_message.Message):
    __slots__ = ("epoch", "version", "is_all", "added", "removed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_ALL_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    is_all: bool
    added: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., is_all: _Optional[bool] = ..., added: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MissingRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MissingResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[TierBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[TierBlock, _Mapping]]] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[TierBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[TierBlock, _Mapping]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InvalidateRequest(_message.Message):
    __slots__ = ("graph_version",)
    GRAPH_VERSION_FIELD_NUMBER: _ClassVar[int]
    graph_version: str
    def __init__(self, graph_version: _Optional[str] = ...) -> None: ...

class InvalidateResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _types_pb2.TokenRequest
    def __init__(self, tokens: _Optional[_Union[_types_pb2.TokenRequest, _Mapping]] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...
