"""Compiles the C++ kernels for the machine at hand and keeps the result in a cache.

``python -m baton.engine.native.build`` builds them ahead of time; otherwise whoever needs them first does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from baton.core.errors import BatonError

SOURCES = Path(__file__).parent / "src"
CACHE = Path("~/.cache/baton/native")
MODEL, KV_COPY = "model", "kv_copy"  # a library each
COMPILERS = ("g++", "c++", "clang++")
COMPILE_SECONDS = 300  # a bound for a machine under heavy load; alone it takes some ten seconds

# No contraction of a * b + c and no fast-math: the kernels say themselves where they fuse, so that a result has the
# same bits in every loop that computes it.
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
_LINKING = ("-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


class NativeUnavailable(BatonError):
    """The native kernels cannot be built, loaded, or do not support the model; the torch decoder can do the work."""

    reason = "NATIVE_UNAVAILABLE"


def build(cache: Path = CACHE, machine: str = "native", name: str = MODEL) -> Path:
    """A shared library, compiled unless the cache has it for these sources, this compiler and this CPU.

    ``machine`` is g++'s ``-march``: "x86-64-v3" gives the AVX2 kernels, "x86-64" the ones for any x86-64. Safe to call
    from several processes at once. Raises NativeUnavailable when there is no compiler or it fails.
    """
    compiler = _find_compiler()
    command = [compiler, *_FLAGS, *_LINKING, f"-march={machine}"]
    directory = cache.expanduser()
    library = directory / f"baton-{name}-{machine}-{_fingerprint(command)}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            output = Path(work) / library.name
            _compile([*command, str(SOURCES / f"{name}.cpp"), "-o", str(output)])
            output.replace(library)
    except OSError as error:
        raise NativeUnavailable(f"native kernels: cannot write {directory}: {error}") from error
    return library


def _find_compiler() -> str:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise NativeUnavailable(f"native kernels: no C++ compiler, looked for {', '.join(COMPILERS)}")
    return found


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"native kernels: {command[0]} took longer than {COMPILE_SECONDS} s") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"native kernels: {command[0]} failed:\n{done.stderr[-4000:]}")


def _fingerprint(command: list[str]) -> str:
    """Changes with anything that could change the library: sources, command, compiler, CPU."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.blake2b(digest_size=12)
    for part in (*command, version, _cpu_features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu_features() -> str:
    """The flags of the first CPU; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.startswith("flags")), "")


if __name__ == "__main__":
    try:
        for each in (MODEL, KV_COPY):
            sys.stdout.write(f"{build(name=each)}\n")
    except NativeUnavailable as error:
        sys.exit(error.message)
