"""Every promise of tests/PROMISES.md names the tests that show it, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests" / "PROMISES.md").read_text().splitlines()
ROW = re.compile(r"\| (?P<number>\d+) \|")
TEST_ID = re.compile(r"`(?P<path>tests/[\w/]+\.py)::(?P<name>\w+)`")


def test_every_promise_has_a_number_of_its_own_and_a_test() -> None:
    rows = [(int(row["number"]), line) for line in LINES if (row := ROW.match(line))]
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers)) != []
    assert [line for _, line in rows if not TEST_ID.search(line)] == []


@pytest.mark.parametrize("path", sorted({test["path"] for test in TEST_ID.finditer("\n".join(LINES))}))
def test_every_test_that_shows_a_promise_exists(path: str) -> None:
    named = {test["name"] for test in TEST_ID.finditer("\n".join(LINES)) if test["path"] == path}
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert named - functions == set()
    assert all(name.startswith("test_") for name in named)
