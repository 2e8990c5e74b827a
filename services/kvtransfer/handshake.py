"""Whether two workers may exchange KV blocks: everything that decides the bytes has to be equal, but for what can be
converted."""

from __future__ import annotations

from baton.core.errors import TransferRejected
from baton.core.types import KvHandshake, ModelCard
from services.kvtransfer.conversion import CONVERTED, KEPT, require_convertible
from services.kvtransfer.transport import TransportName, spoken

PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1  # N and N-1 work together, so that a fleet can be upgraded worker by worker
RESLICE = "reslice"  # the speaker converts blocks of other sizes and shards
LATE_CHECKSUMS = "late-checksums"  # the speaker takes checksums with the confirmation
OFFER_STREAMS = "offer-streams"  # the speaker takes offers as bytes one after another, and late checksums of those
LOCAL_PACKETS = "local-packets"  # the speaker takes offers and confirmations at its door (``baton.rpc.packed``)
FEATURES = (RESLICE, LATE_CHECKSUMS, OFFER_STREAMS)
UNMAPPED_FEATURES = (RESLICE, LATE_CHECKSUMS)  # of a worker whose engine is asked for every write to its pool


def identity(
    worker_id: str,
    epoch: int,
    card: ModelCard,
    transports: tuple[str, ...] = (),
    host: str = "",
    features: tuple[str, ...] = FEATURES,
) -> KvHandshake:
    """What a worker that serves ``card`` says of itself."""
    return KvHandshake(
        worker_id, epoch, card.model, card.weights_hash, card.format, PROTOCOL_VERSION, features, transports, host
    )


def compare(mine: KvHandshake, theirs: KvHandshake) -> None:
    """TransferRejected that names the first field in which ``theirs`` does not fit."""
    if theirs.protocol_version < OLDEST_PROTOCOL_VERSION:
        raise TransferRejected(
            f"protocol_version: at least {OLDEST_PROTOCOL_VERSION} is required, {theirs.worker_id} speaks "
            f"{theirs.protocol_version}"
        )
    pairs = [("weights_hash", mine.weights_hash, theirs.weights_hash)]
    pairs += [(f"format.{name}", getattr(mine.format, name), getattr(theirs.format, name)) for name in KEPT]
    for name, own, other in pairs:
        if own != other:
            raise TransferRejected(f"{name}: {mine.worker_id} has {own!r}, {theirs.worker_id} has {other!r}")
    if mine.format != theirs.format:
        _require_conversion(mine, theirs)


def late_ways(mine: KvHandshake, theirs: KvHandshake) -> frozenset[TransportName]:
    """By which they take the checksums of our blocks with the confirmation. What is converted is verified before."""
    if theirs.format != mine.format:
        return frozenset()
    needed = {way: OFFER_STREAMS if way is TransportName.TCP else LATE_CHECKSUMS for way in TransportName}
    return frozenset(way for way, feature in needed.items() if feature in theirs.features)


def _require_conversion(mine: KvHandshake, theirs: KvHandshake) -> None:
    """TransferRejected that names what differs, unless both can convert it over a transport that both have."""
    name, own, other = next(
        (name, getattr(mine.format, name), getattr(theirs.format, name))
        for name in CONVERTED
        if getattr(mine.format, name) != getattr(theirs.format, name)
    )
    differs = f"format.{name}: {mine.worker_id} has {own!r}, {theirs.worker_id} has {other!r}"
    require_convertible(mine.format, theirs.format)
    for each in (mine, theirs):
        if RESLICE not in each.features:
            raise TransferRejected(f"{differs}, and {each.worker_id} does not convert")
    converting = {way.value for way in TransportName if way.converts}
    common = set(spoken(mine)) & set(spoken(theirs))
    if not common & converting:
        ways = ", ".join(sorted(common)) or "none"
        raise TransferRejected(f"{differs}, which only {', '.join(sorted(converting))} convert; in common are {ways}")
