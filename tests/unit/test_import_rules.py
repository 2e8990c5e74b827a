"""What a process may load, observed in a fresh interpreter; `make lint` checks the same rules in the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"baton", "services", "gateway", "protos", "bench"}

IMPORT_ALL_AND_REPORT = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def loaded_with(package: str) -> set[str]:
    """Top-level names in sys.modules after every module of ``package``, its ``__main__`` too, has been imported."""
    command = [sys.executable, "-c", IMPORT_ALL_AND_REPORT, package]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("package", ["gateway", "services.planner", "baton.client", "baton.rpc", "baton.text"])
def test_never_loads_torch(package: str) -> None:
    assert "torch" not in loaded_with(package)


@pytest.mark.parametrize("package", ["services.prefill", "services.decode"])
def test_worker_front_loads_no_torch(package: str) -> None:
    assert "torch" not in loaded_with(package)


def test_engine_loads_no_grpc() -> None:
    pytest.importorskip("torch")
    assert "grpc" not in loaded_with("baton.engine")


def imported_names(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


def test_core_imports_the_standard_library_only() -> None:
    sources = sorted((ROOT / "baton" / "core").rglob("*.py"))
    assert sources
    foreign = {
        f"{source.relative_to(ROOT)}: {name}"
        for source in sources
        for name in imported_names(source)
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("baton.core")
    }
    assert foreign == set()


OPTIONAL_LIBRARIES = {"flashinfer": "flashinfer-python", "nccl": "nccl4py", "pynvml": "nvidia-ml-py"}  # extra `cuda`
PEERS = {"transformers"}  # measured by the benchmarks where it is installed


def declared_distributions() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["cuda"]
    return {canonical(re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_imported_library_is_declared() -> None:
    providers = packages_distributions()
    declared = declared_distributions()
    undeclared: set[str] = set()
    for package in OURS:
        for source in (ROOT / package).rglob("*.py"):
            libraries = {name.partition(".")[0] for name in imported_names(source)} - sys.stdlib_module_names - OURS
            for library in libraries - PEERS:
                owners = providers.get(library, [OPTIONAL_LIBRARIES.get(library, library)])
                if declared.isdisjoint(map(canonical, owners)):
                    undeclared.add(f"{source.relative_to(ROOT)}: {library}")
    assert undeclared == set()


def test_every_file_of_a_package_is_installed_with_it() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    suffixes = {".py", *(Path(pattern).suffix for pattern in patterns)}
    left_out = {
        str(path.relative_to(ROOT))
        for package in OURS
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in suffixes | {".md", ".pyc"}
    }
    assert left_out == set()
