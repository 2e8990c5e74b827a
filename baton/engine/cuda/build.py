"""Compiles the CUDA sources in ``src`` into one shared library and keeps it, and every object file, in a cache.

``python -m baton.engine.cuda.build`` builds it ahead of time; otherwise the first engine on a GPU does.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import BatonError

SOURCES = Path(__file__).parent / "src"
CACHE = Path("~/.cache/baton/cuda")
INSTALLED = Path("/usr/local/cuda")
COPYING = ("block_copy.cu", "block_engine.cpp", "copy.cpp", "error.cpp", "ipc.cpp")  # what moving KV blocks takes
COMPILE_SECONDS = 600  # a bound for one source file on a machine under heavy load

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# The "a" target has Hopper's own instructions (wgmma, setmaxnreg). ptxas reports registers and spills of every kernel.
_TARGET = "-gencode=arch=compute_90a,code=sm_90a"
_COMPILING = ("-O3", "-std=c++17", _TARGET, "-lineinfo", "-Xcompiler=-fPIC", "-Xptxas=-v")
# The CUDA runtime is inside the library and its symbols stay there, so that torch's own copy cannot take their place.
_LINKING = ("-shared", _TARGET, "-cudart=static", "-Xlinker=--exclude-libs=ALL")


class CudaUnavailable(BatonError):
    """The CUDA kernels cannot be built or loaded, or there is no GPU that runs them; the message names what is missing.

    The torch backend can do the work.
    """

    reason = "CUDA_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """Where nvcc and the libraries to link with are."""

    nvcc: Path
    version: str  # what `nvcc --version` prints
    cublas_lt: Path  # the shared library cublasLt


def build(
    cache: Path = CACHE, homes: Sequence[Path] = (), sources: Path = SOURCES, names: Sequence[str] | None = None
) -> Path:
    """The shared library of all ``*.cu`` and ``*.cpp`` in ``sources``, or of those called ``names``, compiled unless
    the cache has it.

    The cache is keyed by sources, flags and nvcc's version; beside each library a ``.log`` keeps what ptxas reported.
    ``homes`` are CUDA installations to try first (folders with ``bin/nvcc``). Safe to call from several processes at
    once. Raises CudaUnavailable when a tool is missing or fails.
    """
    toolkit = find_toolkit(homes)
    units = {
        path: _digest(*_COMPILING, toolkit.version, *sorted(_included(path)))
        for path in sorted((*sources.glob("*.cu"), *sources.glob("*.cpp")))
        if names is None or path.name in names
    }
    directory = cache.expanduser()
    library = directory / f"baton-{_digest(*_LINKING, str(toolkit.cublas_lt), *units.values())}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda unit: _compile(toolkit, unit[0], unit[1], directory), units.items()))
        _link(toolkit, objects, library)
    except OSError as error:
        raise CudaUnavailable(f"CUDA kernels: cannot build in {directory}: {error}") from error
    return library


def find_toolkit(homes: Sequence[Path] = ()) -> Toolkit:
    """nvcc from ``homes``, then PATH, then the pip packages' folders, then ``/usr/local/cuda``.

    Raises CudaUnavailable naming what was not found and where it was looked for.
    """
    candidates = [*homes, *_path_home(), *_packaged_homes(), INSTALLED]
    home = next((home for home in candidates if (home / "bin" / "nvcc").is_file()), None)
    looked = ", ".join(map(str, candidates))
    if home is None:
        raise CudaUnavailable(f"CUDA kernels: no nvcc; looked on PATH and for bin/nvcc in {looked}")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise CudaUnavailable("CUDA kernels: nvcc needs a C++ compiler; no g++ or c++ on PATH")
    folders = [folder / name for folder in (home, *candidates) for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    cublas_lt = next((found for folder in folders for found in sorted(folder.glob("libcublasLt.so*"))), None)
    if cublas_lt is None:
        raise CudaUnavailable(f"CUDA kernels: no libcublasLt.so; looked in lib64 and lib of {home}, {looked}")
    nvcc = home / "bin" / "nvcc"
    return Toolkit(nvcc, _run([str(nvcc), "--version"]), cublas_lt)


def _included(source: Path) -> set[Path]:
    """``source`` and all it includes, directly or not, from its own folder."""
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            waiting += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
    return found


def _path_home() -> Iterator[Path]:
    found = shutil.which("nvcc")
    if found is not None:
        yield Path(found).resolve().parent.parent


def _packaged_homes() -> Iterator[Path]:
    """The folders of NVIDIA's pip packages; from CUDA 13 on they share one, shaped like an installation."""
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or ()) if package is not None else ():
        yield from sorted(Path(root).glob("cu[0-9]*"), reverse=True)


def _compile(toolkit: Toolkit, source: Path, fingerprint: str, directory: Path) -> Path:
    """The object file of ``source``, with ptxas's report beside it."""
    output = directory / f"{source.stem}-{fingerprint}.o"
    if output.exists():
        return output
    with tempfile.TemporaryDirectory(dir=directory) as work:
        unfinished = Path(work) / output.name
        report = _run([str(toolkit.nvcc), *_COMPILING, "-c", str(source), "-o", str(unfinished)])
        log = Path(work) / "log"
        log.write_text(report)
        log.replace(output.with_suffix(".log"))
        unfinished.replace(output)
    return output


def _link(toolkit: Toolkit, objects: Sequence[Path], library: Path) -> None:
    """Join ``objects``; a process that has torch already holds cublasLt, so the path to it is for others only."""
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        unfinished = Path(work) / library.name
        paths = ("-L", str(toolkit.nvcc.parents[1] / "lib"), "-Xlinker", str(toolkit.cublas_lt))
        search = f"-Xlinker=-rpath={toolkit.cublas_lt.parent}"
        _run([str(toolkit.nvcc), *_LINKING, *map(str, objects), *paths, search, "-o", str(unfinished)])
        reports = (path.with_suffix(".log") for path in objects)
        library.with_suffix(".log").write_text("\n".join(report.read_text() for report in reports if report.exists()))
        unfinished.replace(library)


def _run(command: list[str]) -> str:
    """What ``command`` printed. Raises CudaUnavailable when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CudaUnavailable(f"CUDA kernels: {command[0]} took longer than {COMPILE_SECONDS} s") from error
    if done.returncode != 0:
        raise CudaUnavailable(f"CUDA kernels: {' '.join(command)} failed:\n{(done.stderr or done.stdout)[-4000:]}")
    return done.stdout + done.stderr


def _digest(*parts: str | Path) -> str:
    """Changes with any of ``parts``: a text, or a file's name and content."""
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        content = part.name.encode() + b"\0" + part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(content + b"\0")
    return digest.hexdigest()


def main() -> None:
    """Build and print the library's path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where to keep the result (default: %(default)s)")
    parser.add_argument("--cuda-home", type=Path, action="append", default=[], help="a CUDA installation to try first")
    arguments = parser.parse_args()
    try:
        sys.stdout.write(f"{build(arguments.cache, arguments.cuda_home)}\n")
    except CudaUnavailable as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
