"""The file that ``baton generate --input`` writes: one answer a line, appended as each ends, so that a run resumes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.cli.answers import Answer
from baton.cli.cases import Case
from baton.core.errors import ConfigError, InvalidRequest


def take_over(output: Path, cases: Sequence[Case]) -> list[Case]:
    """The cases that ``output`` does not hold a whole answer for. Lines of failed and half-written ones are dropped
    from the file, so that in the end each choice has one line. InvalidRequest when a line is no answer.
    """
    kept, answered = _answers(output)
    todo = [case for case in cases if answered.get(case.id, 0) < case.request.n]
    again = {case.id for case in todo}
    lines = [line for case_id, line in kept if case_id not in again]
    try:
        _replace(output, lines)
    except OSError as error:
        raise ConfigError(f"generate: --output {output}: cannot be written: {error.strerror}") from error
    return todo


def append(output: Path, answers: Sequence[Answer]) -> None:
    """One write for all choices of a case. ConfigError when it cannot be written, say on a full disk."""
    lines = [json.dumps(answer.as_json(), ensure_ascii=False) + "\n" for answer in answers]
    try:
        with output.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
    except OSError as error:
        raise ConfigError(f"generate: --output {output}: cannot be written: {error.strerror}") from error


def _answers(output: Path) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(case id, line) of every answer without error, and their number by case id."""
    if output.exists() and not (output.is_file() or output.is_dir()):  # a device or pipe may be read without end
        raise ConfigError(f"generate: --output {output}: must be a file, which can be read back")
    try:
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    except OSError as error:
        raise ConfigError(f"generate: --output {output}: cannot be read: {error.strerror}") from error
    kept: list[tuple[str, str]] = []
    answered: dict[str, int] = {}
    *whole, _cut_off_while_written = text.split("\n")
    for line in whole:
        case_id, failed = _case_of(line, output)
        if not failed:
            kept.append((case_id, line + "\n"))
            answered[case_id] = answered.get(case_id, 0) + 1
    return kept, answered


def _case_of(line: str, output: Path) -> tuple[str, bool]:
    try:
        answer = json.loads(line)
        return str(answer["id"]), answer["error"] is not None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{output}: holds a line that is no answer; name another file", field="output") from error


def _replace(output: Path, lines: Sequence[str]) -> None:
    """The file as ``lines``, at once: a run that is stopped here loses nothing."""
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(lines)
        mode = output.stat().st_mode & 0o777 if output.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(mode)
        Path(temporary).replace(output)
    finally:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
