"""What fakeredis lacks of a server's Lua: ``struct``, as far as the quota scripts use it, in doubles."""

from __future__ import annotations

import struct
from typing import Any

import fakeredis


async def add_struct(client: fakeredis.FakeAsyncRedis, server: fakeredis.FakeServer) -> None:
    """To the scripts of ``server``, whose client this is."""
    await client.eval("return 1", 0)  # pyright: ignore[reportUnknownMemberType] (makes the server's Lua)
    inside: Any = server
    lua = inside._lua_runtime
    lua.globals()[b"struct"] = lua.table_from({b"pack": _pack, b"unpack": _unpack})
    inside._lua_expected_globals.add(b"struct")


def _pack(layout: bytes, *numbers: float) -> bytes:
    return struct.pack(f"<{_count(layout)}d", *numbers[: len(layout)])


def _unpack(layout: bytes, data: bytes, start: float = 1) -> tuple[float, ...]:
    """And where the next would begin."""
    whole = struct.Struct(f"<{_count(layout)}d")
    return (*whole.unpack_from(data, int(start) - 1), int(start) + whole.size)


def _count(layout: bytes) -> int:
    assert set(layout) <= set(b"d"), layout
    return len(layout)
