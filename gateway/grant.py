"""A request that was admitted: what it has been delivered, and what the world knows of that."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.deadline import Deadline
from baton.core.errors import Cancelled
from baton.core.types import NOTHING_DELIVERED, Delivered, Progress, QuotaBalance, QuotaClaim
from gateway.delivery_log import DeliverySlot


class Grant:
    """``degraded``: the shared counters did not decide; ``is_local``: this process's did. ``deadline``: that of the
    request. ``slot``: where it is written down what was delivered; None: nowhere."""

    def __init__(self, claim: QuotaClaim, balances: Sequence[QuotaBalance] = ()) -> None:
        self.claim = claim
        self.balances = balances
        self.deadline = Deadline(None)
        self.slot: DeliverySlot | None = None
        self.degraded = False
        self.is_local = False
        self.delivered = NOTHING_DELIVERED
        self._written = NOTHING_DELIVERED

    def note(self, delivered: Delivered) -> None:
        """What is delivered, in all, with the message that is written next. A request that ends is charged for it."""
        self.delivered = delivered

    def written(self) -> None:
        """The message was handed over. Should the process be killed, the request is charged for what was."""
        self._written = self.delivered
        if self.slot is not None:
            self.slot.note(self.delivered)

    def progress(self) -> Progress:
        return Progress(self.claim.request_id, self.claim.account.tenant.name, self.claim.owner, self._written)

    def end_superseded(self) -> None:
        """Another gateway took the request over: what was streamed here is charged with what it delivers, once."""
        self.deadline.cut(
            Cancelled(f"request {self.claim.request_id} was taken over by a later call, at another gateway")
        )
