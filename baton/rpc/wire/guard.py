"""Turning what protobuf says about a bad value or a missing part into InvalidRequest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from google.protobuf.message import Message

from baton.core.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounded:
    """An integer that goes into a field of the wire, and what the field can hold."""

    field: str
    value: int
    low: int
    high: int


def encodes(
    message: str, integers: Callable[P, Iterable[Bounded]] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For requests: a value that does not fit its field (say, a negative token id) is the caller's mistake.

    ``integers`` lists what the error can name; it is called with the same arguments, after a failure only. Answers have
    no such guard: there it is a bug of ours and travels as one.
    """

    def decorate(encode: Callable[P, T]) -> Callable[P, T]:
        @wraps(encode)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return encode(*args, **kwargs)
            except (ValueError, TypeError, OverflowError) as error:
                named = integers(*args, **kwargs) if integers is not None else ()
                for one in named:
                    if not one.low <= one.value <= one.high:
                        limit = f"must be between {one.low} and {one.high}"
                        raise InvalidRequest.out_of_range(one.field, one.value, limit) from error
                raise InvalidRequest(f"{message} cannot be sent: {error}", field=message) from error

        return guarded

    return decorate


def require(message: Message, *fields: str) -> None:
    """InvalidRequest, naming message and field, when a message field is absent or an always-set string is empty."""
    for field in fields:
        value = getattr(message, field)
        absent = not message.HasField(field) if isinstance(value, Message) else not value
        if absent:
            name = f"{message.DESCRIPTOR.name}.{field}"
            raise InvalidRequest(f"{name}: missing", field=name)


def duration(message: Message, field: str) -> float | None:
    """The seconds of an optional field, None when it is absent; InvalidRequest unless finite and not negative."""
    if not message.HasField(field):
        return None
    seconds: float = getattr(message, field)
    if not (math.isfinite(seconds) and seconds >= 0):
        name = f"{message.DESCRIPTOR.name}.{field}"
        raise InvalidRequest.out_of_range(name, seconds, "must be a number of at least 0")
    return seconds


def unknown_value(message: Message, field: str, value: int) -> InvalidRequest:
    """For an enum or oneof value that this version does not know."""
    name = f"{message.DESCRIPTOR.name}.{field}"
    return InvalidRequest(f"{name}: unknown value {value}", field=name)
