"""The build of the CUDA kernels, with a shell script in nvcc's place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.engine.cuda import build as cuda_build
from baton.engine.cuda.build import CudaUnavailable, build, find_toolkit

# Notes what it is asked to do, then writes the file named after -o.
NVCC = """#!/bin/sh
[ "$1" = --version ] && cat "{home}/version" && exit 0
echo "$@" >> "{home}/commands"
grep -qs 'syntax error' -- "$@" && echo "line 1: a syntax error" >&2 && exit 1
echo "ptxas info: 32 registers" >&2
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done
exit 0
"""


class Toolchain:
    """A CUDA installation of scripts, with two sources to build."""

    def __init__(self, root: Path) -> None:
        self.home, self.sources, self.cache = root / "home", root / "src", root / "cache"
        for folder in (self.home / "bin", self.home / "lib64", self.sources):
            folder.mkdir(parents=True)
        (self.home / "lib64" / "libcublasLt.so").touch()
        self.version("13.0")
        nvcc = self.home / "bin" / "nvcc"
        nvcc.write_text(NVCC.format(home=self.home))
        nvcc.chmod(0o755)
        (self.sources / "first.cu").write_text('#include "row.h"\n')
        (self.sources / "second.cpp").write_text("#include <vector>\n")
        (self.sources / "row.h").write_text('#include "common.h"\n')
        (self.sources / "common.h").write_text("// common\n")

    def version(self, text: str) -> None:
        (self.home / "version").write_text(text)

    def build(self) -> Path:
        return build(self.cache, [self.home], self.sources)

    def compiled(self) -> list[str]:
        """The sources compiled since the last call, and "link"."""
        record = self.home / "commands"
        lines = record.read_text().splitlines() if record.exists() else []
        record.unlink(missing_ok=True)
        names = [word.rpartition("/")[2] for line in lines for word in line.split() if word.endswith((".cu", ".cpp"))]
        return sorted(names) + ["link" for line in lines if "-shared" in line.split()]


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    return Toolchain(tmp_path)


def test_a_second_build_compiles_nothing(toolchain: Toolchain) -> None:
    library = toolchain.build()
    assert toolchain.compiled() == ["first.cu", "second.cpp", "link"]
    assert toolchain.build() == library
    assert toolchain.compiled() == []


def test_a_changed_source_is_compiled_alone(toolchain: Toolchain) -> None:
    before = toolchain.build()
    toolchain.compiled()
    (toolchain.sources / "first.cu").write_text("// changed\n")
    assert toolchain.build() != before
    assert toolchain.compiled() == ["first.cu", "link"]


def test_a_changed_header_compiles_what_includes_it(toolchain: Toolchain) -> None:
    before = toolchain.build()
    toolchain.compiled()
    (toolchain.sources / "common.h").write_text("// changed\n")
    assert toolchain.build() != before
    assert toolchain.compiled() == ["first.cu", "link"]


def test_another_compiler_compiles_everything(toolchain: Toolchain) -> None:
    before = toolchain.build()
    toolchain.compiled()
    toolchain.version("13.1")
    assert toolchain.build() != before
    assert toolchain.compiled() == ["first.cu", "second.cpp", "link"]


def test_what_ptxas_reports_is_kept_beside_the_library(toolchain: Toolchain) -> None:
    report = toolchain.build().with_suffix(".log").read_text()
    assert report.count("32 registers") == 2


def test_a_failed_compilation_shows_the_compilers_words_and_leaves_no_library(toolchain: Toolchain) -> None:
    (toolchain.sources / "first.cu").write_text("syntax error\n")
    with pytest.raises(CudaUnavailable, match=r"first\.cu.* failed:\nline 1: a syntax error"):
        toolchain.build()
    assert not list(toolchain.cache.glob("*.so"))
    assert not [path for path in toolchain.cache.iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_named(toolchain: Toolchain) -> None:
    toolchain.cache.write_text("a file where the folder should be")
    with pytest.raises(CudaUnavailable, match=f"cannot build in {toolchain.cache}"):
        toolchain.build()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without CUDA, that has a C++ compiler."""
    tools = tmp_path / "tools"
    tools.mkdir()
    compiler = tools / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(cuda_build, "_packaged_homes", lambda: iter(()))
    monkeypatch.setattr(cuda_build, "INSTALLED", tmp_path / "absent")


@pytest.mark.usefixtures("bare")
def test_a_missing_nvcc_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailable, match=rf"no nvcc.*{tmp_path}/mine, {tmp_path}/absent"):
        find_toolkit([tmp_path / "mine"])


@pytest.mark.usefixtures("bare")
def test_a_missing_cublas_is_named(toolchain: Toolchain) -> None:
    (toolchain.home / "lib64" / "libcublasLt.so").unlink()
    with pytest.raises(CudaUnavailable, match=r"no libcublasLt\.so"):
        find_toolkit([toolchain.home])


@pytest.mark.usefixtures("bare")
def test_a_missing_host_compiler_is_named(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CudaUnavailable, match=r"no g\+\+ or c\+\+"):
        find_toolkit([toolchain.home])


@pytest.mark.usefixtures("bare")
def test_nvcc_on_the_path_is_found(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{toolchain.home / 'bin'}:{os.environ['PATH']}:/bin:/usr/bin")
    assert find_toolkit().nvcc == toolchain.home / "bin" / "nvcc"
