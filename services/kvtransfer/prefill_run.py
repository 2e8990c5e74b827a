"""What is done with a prompt's blocks while it is computed, and what becomes of it when the prompt fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.core.api import PrefillRun
from baton.core.tasks import beside
from baton.core.types import FirstToken

T = TypeVar("T")


async def until_first_token(run: PrefillRun, work: Coroutine[Any, Any, T]) -> tuple[T, FirstToken]:
    """What ``work`` on the run's blocks returns, and the first token, which may come before or after.

    A prompt can fail after all of its blocks were told of, and its engine then gives them to others. So ``work`` is
    given up at once, and the prompt's error is raised, not one that came of it: reads that were refused, checksums of
    others' blocks.
    """
    async with beside(run.first_token()) as drawing, beside(work) as working:
        await asyncio.wait((drawing, working), return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.sleep(0)  # the prompt's failure has come in before what it leads to, but may be heard of later
        if drawing.done():
            drawing.result()
        return working.result(), drawing.result()
