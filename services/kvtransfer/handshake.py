"""Whether two workers may exchange KV blocks: everything that decides the bytes has to be equal."""

from __future__ import annotations

from dataclasses import fields

from baton.core.errors import TransferRejected
from baton.core.types import KvFormat, KvHandshake, ModelCard

PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1  # N and N-1 work together, so that a fleet can be upgraded worker by worker


def identity(
    worker_id: str, epoch: int, card: ModelCard, transports: tuple[str, ...] = (), host: str = ""
) -> KvHandshake:
    """What a worker that serves ``card`` says of itself."""
    return KvHandshake(
        worker_id, epoch, card.model, card.weights_hash, card.format, PROTOCOL_VERSION, (), transports, host
    )


def compare(mine: KvHandshake, theirs: KvHandshake) -> None:
    """TransferRejected that names the first field in which ``theirs`` does not fit."""
    if theirs.protocol_version < OLDEST_PROTOCOL_VERSION:
        raise TransferRejected(
            f"protocol_version: at least {OLDEST_PROTOCOL_VERSION} is required, {theirs.worker_id} speaks "
            f"{theirs.protocol_version}"
        )
    pairs = [("weights_hash", mine.weights_hash, theirs.weights_hash)]
    pairs += [
        (f"format.{field.name}", getattr(mine.format, field.name), getattr(theirs.format, field.name))
        for field in fields(KvFormat)
    ]
    for name, own, other in pairs:
        if own != other:
            raise TransferRejected(f"{name}: {mine.worker_id} has {own!r}, {theirs.worker_id} has {other!r}")
