"""Living with a registry that is away."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.errors import StateUnavailable

MISSES_BEFORE_AWAY = 3  # in a row; a single slow answer is no outage and not worth a line


class RegistryOutage:
    """Around each call of the registry: a failed one is forgiven, an outage and its end are logged once each."""

    def __init__(self, log: logging.Logger, meanwhile: str) -> None:
        """``meanwhile`` says what its user does without the registry ("carrying on")."""
        self._log = log
        self._meanwhile = meanwhile
        self._misses = 0

    @contextmanager
    def forgiven(self) -> Iterator[None]:
        """Run a call to the registry. StateUnavailable ends the block and goes no further."""
        try:
            yield
        except StateUnavailable as error:
            self._misses += 1
            if self._misses == MISSES_BEFORE_AWAY:
                self._log.warning("registry is away, %s", self._meanwhile, extra={"error": error.message})
            return
        if self._misses >= MISSES_BEFORE_AWAY:
            self._log.info("registry is back")
        self._misses = 0
