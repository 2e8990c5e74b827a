"""Structured logs: one JSON object a line on standard error, with what ``log_context`` says of the work at hand."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from baton.core.telemetry import log_fields

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(log_fields())
        line.update({key: value for key, value in record.__dict__.items() if key not in _PLAIN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logs(service: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all of this process's logs through ``JsonFormatter``. Called once, in ``__main__``."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
