"""The quota scripts, called over one connection: calls that come while others are on their way go together next.

A call for each request at once would take a connection each, and most of the time in system calls. So bursts of
thousands cost one round trip for every ``BATCH`` of them. A lone call is sent by its caller, which spares a task.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import cast

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from baton.core.errors import StateUnavailable
from baton.state.redis_client import KeptConnection, Patience, while_heard

NAMES = {  # and what each begins with
    "reserve": ("common", "ending", "debiting"),
    "settle": ("common", "ending", "telling"),
    "charge": ("common", "ending", "debiting"),
    "renew": ("common", "ending", "telling"),
    "recover": ("common", "ending", "telling"),
    "expire": ("common", "ending"),
}
_CONSTANTS = re.compile(r"^ *local ([A-Z_]+(?:, [A-Z_]+)*) = (\d+(?:, \d+)*)(?: --.*)?$", re.MULTILINE)
_NAME = re.compile(r"\b[A-Z_]+\b")
BATCH = 64  # some milliseconds of the server's time


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    command: bytes
    answer: asyncio.Future[object]


class Scripts:
    """Called by hash; a server that does not know one (it restarted) is sent the text.

    A batch whose answers stop coming for ``patience.silence``, or take ``patience.longest`` in all, fails, and all that
    waited behind it: nobody waits in vain for its own turn. A server that is only slow is waited for.
    """

    def __init__(self, client: Redis, patience: Patience) -> None:
        self._connection = KeptConnection(client)
        self._patience = patience
        folder = resources.files("baton.state.quota")
        self._texts = {
            name: _with_constants(
                "\n".join(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in (*parts, name))
            )
            for name, parts in NAMES.items()
        }
        self._hashes = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._texts.items()}
        self._waiting: deque[_Call] = deque()
        self._is_sending = False
        self._sender: asyncio.Task[None] | None = None

    async def call(self, name: str, keys: Sequence[str], *arguments: str | int | bytes) -> object:
        """The script's answer. ``keys``: the organisation's open reservations, and others that the script takes.

        Raises StateUnavailable.
        """
        command = _command(b"EVALSHA", self._hashes[name], len(keys), *keys, *arguments)
        call = _Call(name, command, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if not self._is_sending:
            await self._send_first(call)
        return await call.answer

    async def _send_first(self, call: _Call) -> None:
        """Of calls that come while none is on its way. It goes at once, or with all that come in this turn of the loop.

        What it does for others is a task's, since it may be cancelled.
        """
        self._is_sending = True
        try:
            await asyncio.sleep(0)
            if len(self._waiting) == 1:
                self._waiting.clear()
                await self._send_or_fail([call])
        except BaseException:
            call.answer.cancel()
            raise
        finally:
            self._is_sending = bool(self._waiting)
            if self._is_sending:
                self._sender = asyncio.create_task(self._send_all(), name="quota scripts")

    async def _send_all(self) -> None:
        """Lives as long as somebody waits; whatever ends it, nobody does afterwards."""
        batch: list[_Call] = []
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                batch = [call for call in batch if not call.answer.cancelled()]
                if batch:
                    await self._send_or_fail(batch)
        finally:
            self._is_sending, self._sender = False, None
            self._fail(batch, StateUnavailable("the sending has ended"))

    async def _send_or_fail(self, batch: Sequence[_Call]) -> None:
        try:
            await self._send(batch)
        except StateUnavailable as error:
            self._fail(batch, error)

    def _fail(self, batch: Sequence[_Call], error: StateUnavailable) -> None:
        """And all that wait behind it."""
        for call in (*batch, *self._waiting):
            if not call.answer.done():
                call.answer.set_exception(StateUnavailable(f"quota {call.name}: {error.message}"))
        self._waiting.clear()

    async def _send(self, batch: Sequence[_Call]) -> None:
        answers = await self._answers([call.command for call in batch])
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            await self._load({batch[at].name for at in unknown})
            again = await self._answers([batch[at].command for at in unknown])
            for at, answer in zip(unknown, again, strict=True):
                answers[at] = answer
        for call, answer in zip(batch, answers, strict=True):
            if call.answer.done():
                continue  # its caller went away
            if isinstance(answer, RedisError):
                call.answer.set_exception(StateUnavailable(f"quota {call.name}: {answer}"))
            else:
                call.answer.set_result(answer)

    async def _load(self, names: Iterable[str]) -> None:
        """Over the same connection: the pool may have no other."""
        for answer in await self._answers([_command(b"SCRIPT", b"LOAD", self._texts[name]) for name in names]):
            if isinstance(answer, RedisError):
                raise StateUnavailable(f"load a quota script: {answer}")

    async def _answers(self, commands: Sequence[bytes]) -> list[object]:
        """Errors of single commands are among the answers."""
        return await while_heard(partial(self._exchange, commands), self._patience, "quota")

    async def _exchange(self, commands: Sequence[bytes], heard: Callable[[], None]) -> list[object]:
        """By a connection itself: the client's commands and pipelines would take as long as the script."""
        async with self._connection as connection:
            heard()  # the password was taken, if it is new
            await connection.send_packed_command(commands, check_health=False)
            return [await _answer(connection, heard) for _ in commands]


def _with_constants(text: str) -> str:
    """With ``local NAME, OTHER = 1, 2`` in the place of the names. Lua has no constants, and what a function takes from
    around it is paid for whenever the function is made: at each call of a script."""
    values: dict[str, str] = {}
    for names, numbers in _CONSTANTS.findall(text):
        values.update(zip(names.split(", "), numbers.split(", "), strict=True))
    return _NAME.sub(lambda found: values.get(found[0], found[0]), _CONSTANTS.sub("", text))


def _command(*words: str | int | bytes) -> bytes:
    """As the server reads it. The connection's own way of writing takes four times as long."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


async def _answer(connection: AbstractConnection, heard: Callable[[], None]) -> object:
    try:
        answer = cast(object, await connection.read_response())
    except ResponseError as error:
        answer = error
    heard()
    return answer
