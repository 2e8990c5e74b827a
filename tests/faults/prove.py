"""Shows that a promise's test can fail: makes the promise's one-line change in a copy of the tree and runs the test.

``python -m tests.faults.prove 7 12`` proves these rows of README.md; without numbers it proves ten random ones.
Exits 0 when every test failed in its changed tree.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("mutations.toml")
COPIED = ("baton", "services", "gateway", "protos", "bench", "tests", "pyproject.toml")
ROWS_AT_RANDOM = 10
TEST_SECONDS = 400.0  # above pytest's own limit of a test
TESTS_FAILED = 1  # pytest's exit status; others mean that no test has run, or that it was interrupted


class CannotApply(Exception):
    """The change does not fit the tree."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """In ``file``, ``old`` (within one line, once in the file) becomes ``new``, and then ``test`` fails."""

    number: int
    change: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Change the tree at ``root``. CannotApply unless ``old`` is there exactly once."""
        path = root / self.file
        text = path.read_text()
        found = text.count(self.old)
        if found != 1:
            raise CannotApply(f"{self.number}: {self.file} holds {self.old!r} {found} times, not once")
        path.write_text(text.replace(self.old, self.new))


def read_mutations(path: Path = DATA) -> dict[int, Mutation]:
    """By promise number."""
    entries = tomllib.loads(path.read_text())
    return {int(number): Mutation(int(number), **entry) for number, entry in entries.items()}


def prove(mutation: Mutation) -> str:
    """Empty when the test failed in the changed tree, else what happened instead."""
    with tempfile.TemporaryDirectory(prefix="baton-prove-") as directory:
        root = Path(directory)
        _copy_tree(root)
        mutation.apply(root)
        # No excerpts of the code: Python 3.11 fails to parse one after an error that was deep enough.
        options = ("-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", "--tb=native")
        command = [sys.executable, "-m", "pytest", *options, mutation.test]
        environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, timeout=TEST_SECONDS, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return f"the test did not end within {TEST_SECONDS:.0f} s"
        if done.returncode == TESTS_FAILED:
            return "" if re.search(r"\d+ failed", done.stdout) else f"no test failed, but: {_last_line(done.stdout)}"
        return f"pytest ended with {done.returncode}: {_last_line(done.stdout + done.stderr)}"


def _copy_tree(root: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


def _chosen(arguments: argparse.Namespace, known: dict[int, Mutation]) -> Sequence[int]:
    if arguments.numbers:
        return arguments.numbers
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"prove: {ROWS_AT_RANDOM} rows, seed {seed}", flush=True)
    return random.Random(seed).sample(sorted(known), ROWS_AT_RANDOM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", type=int, nargs="*", help="promise numbers; none: ten at random")
    parser.add_argument("--seed", type=int, help="of the random choice")
    arguments = parser.parse_args()
    known, failures = read_mutations(), 0
    for number in _chosen(arguments, known):
        if number not in known:
            print(f"{number}: no change is known for it, it is marked 'later' or has another number")
            failures += 1
            continue
        trouble = prove(known[number])
        print(f"{number}: {known[number].change}: {trouble or 'red, as it should be'}", flush=True)
        failures += bool(trouble)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
