"""tests/faults/README.md: every promise names the tests that show it, and the change that turns them red; all exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.faults.prove import CannotApply, Mutation, read_mutations

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests" / "faults" / "README.md").read_text().splitlines()
ROW = re.compile(r"\| (?P<number>\d+) \| (?P<promise>[^|]+) \| (?P<tests>[^|]*) \| (?P<change>[^|]+) \|")
TEST_ID = re.compile(r"`(?P<path>tests/[\w/]+\.py)::(?P<name>\w+)`")
ROWS = {int(row["number"]): row for line in LINES if (row := ROW.fullmatch(line))}
TRANSFER, STREAMS = 1, 31  # the promises of KV, of deaths and of streams: each has its change
MUTATIONS = read_mutations()


def is_later(number: int) -> bool:
    return ROWS[number]["promise"].startswith("Later")


def test_every_promise_has_a_number_of_its_own_and_a_test() -> None:
    numbered = [int(row["number"]) for line in LINES if (row := ROW.fullmatch(line))]
    assert numbered == sorted(set(numbered)) != []
    assert [number for number in ROWS if not is_later(number) and not TEST_ID.search(ROWS[number]["tests"])] == []


def test_every_failure_of_transfers_deaths_and_streams_is_promised_and_has_its_change() -> None:
    promised = range(TRANSFER, STREAMS + 1)
    assert [number for number in promised if number not in ROWS] == []
    assert [number for number in promised if not is_later(number) and number not in MUTATIONS] == []


@pytest.mark.parametrize("path", sorted({test["path"] for test in TEST_ID.finditer("\n".join(LINES))}))
def test_every_test_that_shows_a_promise_exists(path: str) -> None:
    named = {test["name"] for test in TEST_ID.finditer("\n".join(LINES)) if test["path"] == path}
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert named - functions == set()
    assert all(name.startswith("test_") for name in named)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=lambda mutation: str(mutation.number))
def test_change_is_of_one_line_that_occurs_once_and_its_test_is_the_rows_first(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert "\n" not in mutation.old + mutation.new and mutation.old != mutation.new
    row = ROWS[mutation.number]
    assert row["tests"].startswith(f"`{mutation.test}`")
    assert row["change"] == f"{mutation.change} (`{mutation.file}`)"


@pytest.mark.parametrize("text", ["nothing\n", "twice = 1  # twice\n"])
def test_change_is_refused_unless_its_line_is_there_exactly_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "code.py").write_text(text)
    mutation = Mutation(7, "", "code.py", "twice", "once", "")
    with pytest.raises(CannotApply, match="not once"):
        mutation.apply(tmp_path)
    assert (tmp_path / "code.py").read_text() == text


def test_change_is_made_where_its_line_is(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 2\n")
    Mutation(7, "", "code.py", "b = 2", "b = 3", "").apply(tmp_path)
    assert (tmp_path / "code.py").read_text() == "a = 1\nb = 3\n"
