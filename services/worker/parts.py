"""The domain objects of one worker, joined: whatever its role, it can do both kinds of work and receive KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.api import EngineApi, KvReceiverApi, PrefillApi
from baton.core.clock import Clock
from baton.core.telemetry import Meter
from baton.core.types import Candidate, Ticket
from services.decode.worker import DecodeWorker
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.ways import Ways
from services.prefill.worker import PrefillWorker


@dataclass(frozen=True, slots=True)
class WorkerParts:
    prefill: PrefillApi
    decode: DecodeWorker
    receiver: KvReceiver
    computing: Callable[[], int]  # requests of both kinds that the engine works on


def build_parts(
    engine: EngineApi,
    me: Candidate,
    *,
    receivers: Callable[[Ticket], KvReceiverApi],
    prefill_peers: Callable[[Candidate], PrefillApi],
    ways: Ways,
    kvtransfer: KvTransferConfig,
    meter: Meter,
    clock: Clock,
) -> WorkerParts:
    """``receivers`` and ``prefill_peers`` give the API of another worker; ``me`` is how others address this one.

    ``ways``: the transports, open for as long as the parts are in use.
    """
    receiver = KvReceiver(ways.answer, me.address, *ways.incoming, meter=meter, clock=clock)
    sender = KvSender(ways.hello, receivers, ways.outgoing, config=kvtransfer, meter=meter, clock=clock)
    decode = DecodeWorker(
        engine,
        receiver,
        prefill_peers,
        me,
        peer_rest_seconds=kvtransfer.peer_rest_seconds,
        meter=meter,
        clock=clock,
    )
    prefill = PrefillWorker(engine, sender, me, meter=meter, clock=clock)
    return WorkerParts(prefill, decode, receiver, lambda: prefill.computing + decode.computing)
