"""The quota scripts, and one call of one within its time budget."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

NAMES = ("reserve", "settle", "charge", "renew", "expire")


class Scripts:
    """Called by hash; a server that does not know one (it restarted) is sent the text."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        folder = resources.files("baton.state.quota")
        common = folder.joinpath("common.lua").read_text(encoding="utf-8")
        self._texts = {
            name: f"{common}\n{folder.joinpath(f'{name}.lua').read_text(encoding='utf-8')}" for name in NAMES
        }
        self._hashes = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._texts.items()}

    async def call(self, name: str, prefix: str, *arguments: str | int) -> object:
        """The script's answer. ``prefix`` begins every key that it touches; one of them routes the call."""
        given = (f"{prefix}open", prefix, *arguments)
        try:
            return cast(object, await self._client.evalsha(self._hashes[name], 1, *given))  # pyright: ignore
        except NoScriptError:
            return cast(object, await self._client.eval(self._texts[name], 1, *given))  # pyright: ignore
