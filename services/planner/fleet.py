"""What the planner knows of the fleet: the registry's records and its own decisions that they do not show yet."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.core.clock import Clock
from baton.core.types import ProcessRecord, Role

MAX_KNOWN_MODELS = 1024


@dataclass(frozen=True, slots=True)
class Fleet:
    """A snapshot. ``in_flight``: tokens promised to each worker id by decisions too young to show in its stats."""

    workers: tuple[ProcessRecord, ...] = ()
    known_models: frozenset[str] = frozenset()
    in_flight: Mapping[str, int] = field(default_factory=dict[str, int])


class FleetPicture:
    """Fed with the registry's records; keeps the last ones while the registry is away.

    A model once seen stays known, so that a fleet whose workers are all down answers Overloaded, not UnknownModel.
    """

    def __init__(self) -> None:
        self._workers: tuple[ProcessRecord, ...] = ()
        self._known: OrderedDict[str, None] = OrderedDict()

    def update(self, records: Iterable[ProcessRecord]) -> None:
        roles = (Role.PREFILL, Role.DECODE)
        self._workers = tuple(record for record in records if record.role in roles and record.card is not None)
        for record in self._workers:
            if record.card is not None:
                self._known[record.card.model] = None
                self._known.move_to_end(record.card.model)
        while len(self._known) > MAX_KNOWN_MODELS:
            self._known.popitem(last=False)

    def snapshot(self, in_flight: Mapping[str, int]) -> Fleet:
        return Fleet(self._workers, frozenset(self._known), in_flight)


class InFlight:
    """Tokens of decisions younger than ``seconds``, by worker id: without it, all callers between two heartbeats would
    be sent to the same least loaded worker."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._decisions: deque[tuple[float, str, int]] = deque()
        self._tokens: dict[str, int] = {}

    def add(self, worker_id: str, tokens: int) -> None:
        self._decisions.append((self._clock.now(), worker_id, tokens))
        self._tokens[worker_id] = self._tokens.get(worker_id, 0) + tokens

    def tokens(self) -> Mapping[str, int]:
        """A live view; decisions that have aged are dropped first."""
        oldest = self._clock.now() - self._seconds
        while self._decisions and self._decisions[0][0] <= oldest:
            _, worker_id, tokens = self._decisions.popleft()
            self._tokens[worker_id] -= tokens
            if self._tokens[worker_id] == 0:
                del self._tokens[worker_id]
        return self._tokens
