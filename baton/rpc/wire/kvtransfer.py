"""kvtransfer.proto: offers and confirmations of KV blocks, and the directory's messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.types import KvChunk, KvConfirmation, KvHandshake, KvSource, TierBlock, TierChanges
from baton.rpc.wire.guard import encodes, require
from baton.rpc.wire.offer import Offer
from baton.rpc.wire.types import (
    handshake_from_wire,
    handshake_to_wire,
    kv_format_from_wire,
    kv_format_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)
from protos.baton.v1 import kvtransfer_pb2 as pb


@encodes("OfferRequest")
def chunk_to_wire(chunk: KvChunk) -> Offer:
    rest = pb.OfferRequest(
        ticket=ticket_to_wire(chunk.ticket),
        first_block=chunk.first_block,
        block_count=chunk.block_count,
        checksums=chunk.checksums,
        source=None if chunk.source is None else _source_to_wire(chunk.source),
        format=None if chunk.format is None else kv_format_to_wire(chunk.format),
        late_checksums=chunk.late_checksums,
    )
    return Offer(rest, chunk.pieces or (chunk.payload,))


def chunk_from_wire(offer: Offer) -> KvChunk:
    message = offer.rest
    require(message, "ticket", "block_count")
    return KvChunk(
        ticket=ticket_from_wire(message.ticket),
        first_block=message.first_block,
        block_count=message.block_count,
        payload=offer.pieces[0] if offer.pieces else b"",
        checksums=tuple(message.checksums),
        source=_source_from_wire(message.source) if message.HasField("source") else None,
        format=kv_format_from_wire(message.format) if message.HasField("format") else None,
        late_checksums=message.late_checksums,
    )


def _source_to_wire(source: KvSource) -> pb.KvSource:
    return pb.KvSource(
        epoch=source.epoch,
        blocks=source.blocks,
        transport=source.transport,
        link=source.link,
        number=source.number,
        invitation=source.invitation,
    )


def _source_from_wire(message: pb.KvSource) -> KvSource:
    return KvSource(
        message.epoch,
        tuple(message.blocks),
        message.transport or "shm",
        message.link,
        message.number,
        message.invitation,
    )


@encodes("ConfirmRequest")
def confirmation_to_wire(confirmation: KvConfirmation) -> pb.ConfirmRequest:
    return pb.ConfirmRequest(
        ticket=ticket_to_wire(confirmation.ticket),
        first_block=confirmation.first_block,
        block_count=confirmation.block_count,
        checksums=confirmation.checksums,
    )


def confirmation_from_wire(message: pb.ConfirmRequest) -> KvConfirmation:
    require(message, "ticket", "block_count")
    return KvConfirmation(
        ticket=ticket_from_wire(message.ticket),
        first_block=message.first_block,
        block_count=message.block_count,
        checksums=tuple(message.checksums),
    )


# --- directory --------------------------------------------------------------------------------------------------------


@encodes("AnnounceRequest")
def announcement_to_wire(peer: KvHandshake, address: str) -> pb.AnnounceRequest:
    return pb.AnnounceRequest(peer=handshake_to_wire(peer), address=address)


@encodes("PublishRequest")
def publication_to_wire(
    worker_id: str, epoch: int, sequence: int, added: Sequence[bytes], removed: Sequence[bytes]
) -> pb.PublishRequest:
    return pb.PublishRequest(worker_id=worker_id, epoch=epoch, sequence=sequence, added=added, removed=removed)


@encodes("ResetRequest")
def reset_to_wire(worker_id: str, epoch: int, sequence: int, held: Sequence[bytes]) -> pb.ResetRequest:
    return pb.ResetRequest(worker_id=worker_id, epoch=epoch, sequence=sequence, held=held)


def holders_to_wire(leading_blocks: dict[str, int]) -> pb.HoldersResponse:
    return pb.HoldersResponse(leading_blocks=leading_blocks)


def peers_to_wire(peers: Iterable[tuple[KvHandshake, str]]) -> pb.ListPeersResponse:
    listed = [pb.Peer(handshake=handshake_to_wire(handshake), address=address) for handshake, address in peers]
    return pb.ListPeersResponse(peers=listed)


def peers_from_wire(message: pb.ListPeersResponse) -> tuple[tuple[KvHandshake, str], ...]:
    for peer in message.peers:
        require(peer, "handshake", "address")
    return tuple((handshake_from_wire(peer.handshake), peer.address) for peer in message.peers)


# --- cache tier -------------------------------------------------------------------------------------------------------


def block_to_wire(block: TierBlock) -> pb.TierBlock:
    return pb.TierBlock(
        name=block.name, payload=block.payload, checksum=block.checksum, graph_version=block.graph_version
    )


def block_from_wire(message: pb.TierBlock) -> TierBlock:
    return TierBlock(message.name, message.payload, message.checksum, message.graph_version)


@encodes("PutRequest")
def put_to_wire(blocks: Iterable[TierBlock]) -> pb.PutRequest:
    return pb.PutRequest(blocks=[block_to_wire(block) for block in blocks])


def changes_to_wire(changes: TierChanges) -> pb.ChangesResponse:
    return pb.ChangesResponse(
        epoch=changes.epoch,
        version=changes.version,
        is_all=changes.is_all,
        added=changes.added,
        removed=changes.removed,
    )


def changes_from_wire(message: pb.ChangesResponse) -> TierChanges:
    return TierChanges(message.epoch, message.version, message.is_all, tuple(message.added), tuple(message.removed))
