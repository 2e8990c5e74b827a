"""The API key that a caller shows: ``authorization: Bearer KEY`` or ``x-api-key: KEY``."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

_BEARER: Final = "bearer "


def presented_key(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """None when the call brings none."""
    metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    authorization = metadata.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return metadata.get("x-api-key")
