"""Starting a service: its command line, its logs, its event loop, and the one edge where anything may be caught."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop

from baton.core.arguments import Arguments, parse
from baton.core.config import Section
from baton.core.errors import BatonError, Cancelled
from baton.core.tether import die_with_parent
from baton.telemetry.logs import configure_logs

log = logging.getLogger(__name__)


def run_service(
    package: str, sections: Sequence[Section[Any]], serve: Callable[[Arguments], Coroutine[Any, Any, None]]
) -> None:
    """Run ``serve`` to its end and exit: 0 after an orderly stop, 1 with the reason logged last."""
    arguments = parse(package, sections)
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    configure_logs(arguments.id)
    try:
        uvloop.run(serve(arguments))
    except Cancelled as error:
        log.info(error.message)
    except BatonError as error:
        log.error(error.message, extra={"reason": error.reason})
        sys.exit(1)
    except asyncio.CancelledError:
        sys.exit(1)
    except Exception:
        log.exception("bug")
        sys.exit(1)
