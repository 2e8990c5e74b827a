"""Runs the unit tests that need no torch in an environment that has none: `make test-torch-free PYTHON=python3.13`.

``requirements`` prints what such an environment needs; ``run`` finds the test files that do not reach torch and hands
them to pytest. A room that has to work without torch fails the run if one of its test files reaches it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "tests" / "unit"
TORCH_FREE_ROOMS = ("core", "text", "state", "rpc", "telemetry", "client", "gateway", "planner")
TEST_TOOLS = {"pytest", "pytest-timeout", "hypothesis", "fakeredis"}


def requirements() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name = re.split(r"[^A-Za-z0-9_-]", requirement, maxsplit=1)[0]
        if name != "torch" and (requirement in project["dependencies"] or name in TEST_TOOLS):
            yield requirement


def module_file(module: str) -> Path | None:
    """The source of a module of this repository, or None for a foreign one."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def imports_at_load(node: ast.AST) -> Iterator[str]:
    """Modules that importing ``node``'s file imports: not those inside functions or under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_load(child)


@cache
def imports_of(path: Path) -> frozenset[str]:
    names = set(imports_at_load(ast.parse(path.read_text())))
    parents = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return frozenset(names | parents)


def reaches_torch(path: Path) -> bool:
    seen: set[Path] = set()
    todo = [path]
    while todo:
        current = todo.pop()
        seen.add(current)
        names = imports_of(current)
        if "torch" in names:
            return True
        todo += [file for name in names if (file := module_file(name)) and file not in seen]
    return False


def run(arguments: list[str]) -> int:
    import pytest

    tests = sorted(UNIT.rglob("test_*.py"))
    with_torch = {path for path in tests if reaches_torch(path)}
    wrong = [path for path in with_torch if set(path.relative_to(UNIT).parts) & set(TORCH_FREE_ROOMS)]
    if wrong:
        print("these tests reach torch and must not:", *(str(path.relative_to(ROOT)) for path in wrong), sep="\n  ")
        return 1
    print(f"torch-free: {len(tests) - len(with_torch)} test files, {len(with_torch)} left out")
    return pytest.main(["-q", *arguments, *(str(path) for path in tests if path not in with_torch)])


if __name__ == "__main__":
    if sys.argv[1] == "requirements":
        print(*requirements(), sep="\n")
    else:
        sys.exit(run(sys.argv[2:]))
