"""When requests come and how long they are: drawn from a Poisson process, or read from a trace."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from baton.core.errors import ConfigError

TRACE_BLOCK_TOKENS = 512  # of the prefix blocks that the conversation trace names


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: due ``at`` seconds after the run's beginning. ``blocks`` name the prompt's leading blocks, each of
    ``block_tokens`` tokens, that other prompts may share; empty: shared with nobody."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS


def poisson(rate: float, prompt: int, output: int, seed: int) -> Iterator[Arrival]:
    """Without end: ``rate`` requests a second on average, all of one shape."""
    random, at = np.random.default_rng(seed), 0.0
    while True:
        at += float(random.exponential(1 / rate))
        yield Arrival(at, prompt, output)


def scaled(arrivals: list[Arrival], *, lengths: float, speed: float) -> list[Arrival]:
    """The same trace with all lengths times ``lengths`` (at least 1 token), played ``speed`` times as fast."""

    def length(tokens: int) -> int:
        return max(1, round(tokens * lengths))

    return [
        replace(
            arrival,
            at=arrival.at / speed,
            prompt=length(arrival.prompt),
            output=length(arrival.output),
            block_tokens=length(arrival.block_tokens),
        )
        for arrival in arrivals
    ]


def read_trace(path: Path) -> list[Arrival]:
    """A ``.jsonl`` trace (timestamp in ms, input_length, output_length, hash_ids) or a ``.csv`` one (TIMESTAMP,
    ContextTokens, GeneratedTokens), gzipped or not. The first arrival is at 0. ConfigError names file and line."""
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in (".jsonl", ".csv"):
        raise ConfigError(f"--trace {path}: must be a .jsonl or .csv file, gzipped or not")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except OSError as error:  # gzip raises it too, for what is no archive
        raise ConfigError(f"--trace {path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: damaged: {error}") from error
    rows = _json_rows(path, text) if suffix == ".jsonl" else _csv_rows(path, text)
    arrivals = sorted(rows, key=lambda arrival: arrival.at)
    if not arrivals:
        raise ConfigError(f"--trace {path}: has no requests")
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]


def _json_rows(path: Path, text: str) -> Iterator[Arrival]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            yield _checked(
                row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row.get("hash_ids", ()))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"--trace {path}: line {number}: {error!r}") from error


def _csv_rows(path: Path, text: str) -> Iterator[Arrival]:
    reader = csv.DictReader(io.StringIO(text))
    for row in reader:
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the seventh digit of the second is beyond it
            at = (moment - datetime.min).total_seconds()
            yield _checked(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"--trace {path}: line {reader.line_num}: {error!r}") from error


def _checked(at: float, prompt: int, output: int, blocks: tuple[int, ...]) -> Arrival:
    if prompt < 1 or output < 1:
        raise ValueError(f"lengths must be at least 1, got {prompt} in, {output} out")
    return Arrival(at, prompt, output, blocks)
