"""Runs over many cases: what the answer file holds, how many run at once, and going on after an interruption."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest

from baton.cli.answer_file import append
from baton.cli.answers import Answer
from baton.cli.ask import ask_and_print, run_cases
from baton.cli.cases import Case
from baton.client import Client
from baton.core.clock import SystemClock
from baton.core.errors import ConfigError, InvalidRequest, Overloaded
from baton.core.types import FinishReason, GenerateChunk, GenerateRequest, Usage


class Door:
    """Answers each choice with its request's prompt; fails the prompts in ``failing``."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.failing = failing
        self.asked: list[int] = []
        self.running = 0
        self.most = 0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        assert request.prompt_token_ids is not None
        [number] = request.prompt_token_ids
        self.asked.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if number in self.failing:
                raise Overloaded("full")
            for index in range(request.n):
                done = Usage(completion_tokens=1)
                yield GenerateChunk(
                    "r", index, token_ids=(number,), text="\u2028", finish=FinishReason.STOP, usage=done
                )
        finally:
            self.running -= 1


def cases(count: int, n: int = 1) -> list[Case]:
    return [Case(f"case-{i}", GenerateRequest(prompt_token_ids=(i,), n=n)) for i in range(count)]


def run(door: Door, todo: list[Case], output: Path, concurrency: int = 3) -> int:
    return asyncio.run(run_cases(cast(Client, door), todo, output, concurrency, SystemClock()))


def written(output: Path) -> list[str]:
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]
    assert all(line["error"] is None for line in lines)
    return sorted(line["id"] for line in lines)


def test_runs_as_many_at_once_as_asked_for_and_no_more(tmp_path: Path) -> None:
    door = Door()
    assert run(door, cases(10), tmp_path / "out.jsonl") == 0
    assert door.most == 3
    assert written(tmp_path / "out.jsonl") == sorted(f"case-{i}" for i in range(10))


def test_a_second_run_asks_only_for_what_is_missing_and_leaves_one_line_a_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(Door(frozenset({2, 3})), cases(5), output) == 1
    assert "2 of 5 cases failed, the last one case-" in capsys.readouterr().err
    again = Door()
    assert run(again, cases(5), output) == 0
    assert sorted(again.asked) == [2, 3]
    assert written(output) == [f"case-{i}" for i in range(5)]


def test_a_line_cut_off_by_a_crash_is_asked_for_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(Door(), cases(3), output)
    output.write_bytes(output.read_bytes()[:-20])
    again = Door()
    assert run(again, cases(3), output) == 0
    assert len(again.asked) == 1
    assert len(written(output)) == 3


def test_a_case_counts_as_answered_when_all_its_choices_are(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(Door(), cases(2, n=2), output)
    kept = output.read_text(encoding="utf-8").split("\n")
    output.write_text("\n".join(kept[:3]) + "\n", encoding="utf-8")
    again = Door()
    assert run(again, cases(2, n=2), output) == 0
    assert len(again.asked) == 1
    assert written(output) == ["case-0", "case-0", "case-1", "case-1"]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "notes.txt"
    output.write_text("dear diary\n")
    with pytest.raises(InvalidRequest, match="holds a line that is no answer"):
        run(Door(), cases(1), output)
    assert output.read_text() == "dear diary\n"


def test_an_output_that_cannot_be_written_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    door = Door()
    with pytest.raises(ConfigError, match="cannot be written"):
        run(door, cases(1), tmp_path / "none" / "out.jsonl")
    assert door.asked == []


def test_leaving_a_run_early_ends_what_runs(tmp_path: Path) -> None:
    class Stuck(Door):
        async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
            self.running += 1
            try:
                await asyncio.Event().wait()
                yield GenerateChunk("r")
            finally:
                self.running -= 1

    async def main() -> None:
        door = Stuck()
        task = asyncio.create_task(run_cases(cast(Client, door), cases(9), tmp_path / "out.jsonl", 4, SystemClock()))
        async with asyncio.timeout(30):
            while door.running < 4:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert door.running == 0

    asyncio.run(main())


def test_an_output_that_is_no_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # reading it would wait for ever; a device may be read without end
    with pytest.raises(ConfigError, match="pipe: must be a file"):
        run(Door(), cases(1), pipe)


def test_a_disk_that_fills_up_is_told(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"out.jsonl: cannot be written: No space left on device"):
        append(output, [Answer("a")])


def test_a_request_that_fails_is_told_once_however_many_choices_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    request = GenerateRequest(prompt_token_ids=(1,), n=1000)
    assert asyncio.run(ask_and_print(cast(Client, Door(frozenset({1}))), request, SystemClock(), as_json=False)) == 1
    assert capsys.readouterr() == ("", "error: OVERLOADED: full\n")
