"""The kernels of src/mid_rows.cu themselves, compiled for the CPU over emulated threads, copies and barriers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from baton.engine.cuda.build import SOURCES

EMULATION = Path(__file__).parent / "emulation"
COMPILER = shutil.which("g++")
SHARED_MEMORY = {
    "extern __shared__ char shared[];": "char *const shared = static_cast<char *>(place(STAGES_AT));",
    "__shared__ __align__(8) uint64_t full[S::STAGES], empty[S::STAGES];": (
        "uint64_t *const full = static_cast<uint64_t *>(place(BARRIERS)), *const empty = full + S::STAGES;"
    ),
    "__shared__ Terms<S::WEIGHT_ROWS, S::COLUMNS> terms;": (
        "auto &terms = *static_cast<Terms<S::WEIGHT_ROWS, S::COLUMNS> *>(place(TERMS));"
    ),
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def emulated_source() -> str:
    """The device code, without includes, over the emulated shared memory."""
    kernel, _, launches = (SOURCES / "mid_rows.cu").read_text().partition("struct Variant {")
    assert launches
    for declared, placed in SHARED_MEMORY.items():
        assert kernel.count(declared) == 1
        kernel = kernel.replace(declared, placed)
    source = (SOURCES / "mid_rows_results.h").read_text() + kernel + "}\n}\n"
    return re.sub(r"^#.*$", "", source, flags=re.MULTILINE)


def run_trials(source: str, folder: Path, seed: int) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    (folder / "kernel.h").write_text(source)
    program, trials = folder / "trials", EMULATION / "mid_rows_trials.cpp"
    command = [COMPILER, "-std=c++17", "-O1", "-I", str(folder), "-I", str(EMULATION), str(trials), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return subprocess.run([program, str(seed)], capture_output=True, text=True, timeout=300, check=False)


def test_every_output_is_right_however_late_copies_end(tmp_path: Path) -> None:
    done = run_trials(emulated_source(), tmp_path, seed=1)
    assert (done.stdout, done.stderr) == ("every output is right\n", "")


@pytest.mark.parametrize(
    ("line", "without", "seen"),
    [
        ("wait_for_predecessor();\n    if (copies)", "if (copies)", "an output is wrong"),
        ("wait_for(full_at(at.stage), at.parity);", "", "an output is wrong"),
        ("sync_cluster();", "sync_threads<S::CONSUMERS>();", "has ended|an output is wrong"),
    ],
)
def test_a_missing_wait_is_seen(tmp_path: Path, line: str, without: str, seen: str) -> None:
    source = emulated_source()
    assert source.count(line) == 1
    done = run_trials(source.replace(line, without), tmp_path, seed=1)
    assert done.returncode != 0
    assert re.search(seen, done.stderr)
