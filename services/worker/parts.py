"""The domain objects of one worker, joined: whatever its role, it can do both kinds of work and receive KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.api import EngineApi, KvReceiverApi, PrefillApi
from baton.core.clock import Clock
from baton.core.telemetry import SILENT_TRACER, Meter, Tracer
from baton.core.types import Candidate, Ticket
from services.decode.worker import DecodeWorker
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.fetcher import PrefixFetcher
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.tier_peer import NoTier, Tiers
from services.kvtransfer.transports import Transports
from services.kvtransfer.warm import WorkerWarmer
from services.prefill.worker import PrefillWorker


@dataclass(frozen=True, slots=True)
class WorkerParts:
    prefill: PrefillApi
    decode: DecodeWorker
    receiver: KvReceiver
    warmer: WorkerWarmer
    economy: FetchEconomy
    computing: Callable[[], int]  # requests of both kinds that the engine works on


def build_parts(
    engine: EngineApi,
    me: Candidate,
    *,
    receivers: Callable[[Ticket], KvReceiverApi],
    prefill_peers: Callable[[Candidate], PrefillApi],
    transports: Transports,
    kvtransfer: KvTransferConfig,
    meter: Meter,
    clock: Clock,
    tiers: Tiers | None = None,
    tracer: Tracer = SILENT_TRACER,
) -> WorkerParts:
    """``receivers`` and ``prefill_peers`` give the API of another worker; ``me`` is how others address this one.

    ``transports`` are open for as long as the parts are in use. Without ``tiers`` it uses no cache tier.
    """
    tiers = tiers or NoTier()
    economy = FetchEconomy(
        bytes_per_second=kvtransfer.tier_mb_per_second * 1e6,
        tokens_per_second=kvtransfer.tier_prefill_tokens_per_second,
        min_tokens=kvtransfer.tier_min_tokens,
    )
    fetcher = PrefixFetcher(
        engine,
        tiers,
        economy,
        message_bytes=kvtransfer.tier_message_bytes,
        answer_seconds=kvtransfer.tier_answer_seconds,
        meter=meter,
        clock=clock,
    )
    receiver = KvReceiver(transports.answer, me.address, *transports.incoming, meter=meter, clock=clock)
    sender = KvSender(
        transports.hello, receivers, transports.outgoing, config=kvtransfer, meter=meter, clock=clock, tracer=tracer
    )
    decode = DecodeWorker(
        engine,
        receiver,
        fetcher,
        economy,
        prefill_peers,
        me,
        peer_rest_seconds=kvtransfer.peer_rest_seconds,
        meter=meter,
        clock=clock,
    )
    prefill = PrefillWorker(engine, sender, fetcher, economy, me, meter=meter, clock=clock)
    warmer = WorkerWarmer(engine, tiers, message_bytes=kvtransfer.tier_message_bytes)
    return WorkerParts(prefill, decode, receiver, warmer, economy, lambda: prefill.computing + decode.computing)
