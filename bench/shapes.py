"""The workloads of ``baton bench offline``, and how they are spelled.

============================  ==================================================================================
``batch:N x IN/OUT``          N requests at once; lengths are numbers or ranges (``100-1024``: uniform, inclusive)
``prefill:N x IN``            the same with a single token out
``decode:N x IN/OUT``         the time of a step while all N requests decode
``ttft:IN``                   one request at a time on an idle engine
``repeat:N x IN/OUT``         answers that repeat themselves, without drafts and with them
============================  ==================================================================================

without the blanks. ``NAMED`` has the shapes that Baton is compared with others by.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.core.errors import ConfigError

MAX_REQUESTS = 100_000
MAX_TOKENS = 1 << 20

NAMED = {
    "mixed256": ("batch:256x100-1024/100-1024",),
    "long1000": ("batch:1000x1024/256",),
    "prefill": ("prefill:64x1024", "prefill:16x8192", "prefill:8x16384"),
    "decode": ("decode:1x1024/128", "decode:64x1024/128", "decode:256x1024/128"),
    "ttft": ("ttft:2048",),
}
SPECULATION = {"speculation": ("repeat:1x512/512",)}  # on an engine that speculates, so not among the others
_RANGE = r"(\d+)(?:-(\d+))?"
_SPELLINGS = {
    "batch": re.compile(rf"(\d+)x{_RANGE}/{_RANGE}"),
    "prefill": re.compile(rf"(\d+)x{_RANGE}"),
    "decode": re.compile(r"(\d+)x(\d+)/(\d+)"),
    "ttft": re.compile(r"(\d+)"),
    "repeat": re.compile(r"(\d+)x(\d+)/(\d+)"),
}


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Batch:
    """All requests are sent at once; measured until the last one has ended."""

    name: str
    requests: int
    prompt: Range
    output: Range

    @property
    def context(self) -> int:
        """Positions that the longest request needs."""
        return self.prompt.high + self.output.high

    @property
    def roomy_context(self) -> int:
        """Positions that make the measurement easiest."""
        return self.context


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """``requests`` are sent at once; measured from the last one's first token to the first one's ``output``-th.

    Where that leaves fewer than ``MIN_STEPS`` steps, because prompts take long, the answers go on beyond ``output``.
    """

    MIN_STEPS = 32

    name: str
    requests: int
    prompt: int
    output: int

    @property
    def max_tokens(self) -> int:
        """More than is measured: nobody may end by itself before everybody has been measured."""
        return 2 * self.output + 1024

    @property
    def context(self) -> int:
        return self.prompt + max(self.output, self.MIN_STEPS)

    @property
    def roomy_context(self) -> int:
        return self.prompt + self.max_tokens


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Requests for a single token, each to an engine that has been idle for a while."""

    REQUESTS = 10
    IDLE_SECONDS = 0.5  # a GPU that has just worked at its power limit runs slower for a moment

    name: str
    prompt: int
    requests: int = 1  # at a time

    @property
    def context(self) -> int:
        return self.prompt + 1

    @property
    def roomy_context(self) -> int:
        return self.context


@dataclass(frozen=True, slots=True)
class Repeat:
    """``requests`` whose prompts repeat ``PATTERN`` tokens, to which their answers are held."""

    PATTERN = 8

    name: str
    requests: int
    prompt: int
    output: int

    @property
    def context(self) -> int:
        return self.prompt + self.output

    @property
    def roomy_context(self) -> int:
        return self.context


Shape = Batch | DecodeStep | FirstToken | Repeat


def parse_shapes(listed: str) -> list[Shape]:
    """Names and spellings, separated by commas. ConfigError names the one that is neither."""
    known = NAMED | SPECULATION
    return [_parse(spelling) for name in listed.split(",") for spelling in known.get(name.strip(), (name.strip(),))]


def _parse(spelling: str) -> Shape:
    kind, _, rest = spelling.partition(":")
    match = _SPELLINGS[kind].fullmatch(rest) if kind in _SPELLINGS else None
    if match is None:
        forms = "batch:NxIN/OUT, prefill:NxIN, decode:NxIN/OUT, ttft:IN, repeat:NxIN/OUT"
        raise ConfigError(f"--shapes: must be {', '.join(NAMED | SPECULATION)}, or one of {forms}, got {spelling!r}")
    numbers = [None if group is None else int(group) for group in match.groups()]
    for number in numbers:
        if number is not None and not 1 <= number <= MAX_TOKENS:
            raise ConfigError(f"--shapes: {spelling}: lengths must be from 1 to {MAX_TOKENS}, got {number}")
    shape = _build(kind, spelling, numbers)
    if shape.requests > MAX_REQUESTS:
        raise ConfigError(f"--shapes: {spelling}: at most {MAX_REQUESTS} requests, got {shape.requests}")
    return shape


def _build(kind: str, name: str, numbers: list[int | None]) -> Shape:
    match kind, numbers:
        case "batch", [int(requests), int(prompt), prompt_high, int(output), output_high]:
            return Batch(name, requests, _range(name, prompt, prompt_high), _range(name, output, output_high))
        case "prefill", [int(requests), int(prompt), prompt_high]:
            return Batch(name, requests, _range(name, prompt, prompt_high), Range(1, 1))
        case "decode", [int(requests), int(prompt), int(output)]:
            return DecodeStep(name, requests, prompt, output)
        case "ttft", [int(prompt)]:
            return FirstToken(name, prompt)
        case "repeat", [int(requests), int(prompt), int(output)]:
            return Repeat(name, requests, prompt, output)
        case _:
            raise AssertionError(f"{name}: the spelling of {kind} and its numbers differ")


def _range(name: str, low: int, high: int | None) -> Range:
    if high is not None and high < low:
        raise ConfigError(f"--shapes: {name}: a range must ascend, got {low}-{high}")
    return Range(low, low if high is None else high)
