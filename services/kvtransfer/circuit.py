"""Peers that were just lost, so that a request does not find out again what another one learned."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from baton.core.clock import Clock

log = logging.getLogger(__name__)


class Circuit:
    """Remembers each lost peer for ``rest_seconds``. A restarted peer has another epoch and so another key."""

    def __init__(self, clock: Clock, rest_seconds: float) -> None:
        self._clock = clock
        self._rest = rest_seconds
        self._until: dict[Hashable, float] = {}

    def trip(self, peer: Hashable, cause: str) -> None:
        """The peer failed: leave it alone for a while. Logged once per rest."""
        now = self._clock.now()
        if not self.is_open(peer):
            log.warning("peer down", extra={"peer": str(peer), "cause": cause, "rest_seconds": self._rest})
        self._until = {key: until for key, until in self._until.items() if until > now}
        self._until[peer] = now + self._rest

    def is_open(self, peer: Hashable) -> bool:
        """True while the peer should not be called."""
        return self._until.get(peer, float("-inf")) > self._clock.now()
