"""Workers get their GPUs from the launcher: their own first, then those of the workers whose pools they map."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.placement import Gpu, checked_gpus, known_gpus, visible_gpus
from baton.core.errors import ConfigError
from baton.core.types import Role

P0, P1, D0, D1 = (
    (Role.PREFILL, "prefill-0"),
    (Role.PREFILL, "prefill-1"),
    (Role.DECODE, "decode-0"),
    (Role.DECODE, "decode-1"),
)


def test_every_worker_sees_its_own_gpu_first_and_the_others_after_it() -> None:
    assert visible_gpus([P0, D0], ["0", "1"], {}) == {"prefill-0": "0,1", "decode-0": "1,0"}


def test_workers_take_the_gpus_in_turn() -> None:
    found = visible_gpus([P0, D0, D1], ["2", "3"], {})
    assert {worker: gpus.partition(",")[0] for worker, gpus in found.items()} == {
        "prefill-0": "2",
        "decode-0": "3",
        "decode-1": "2",
    }


def test_a_gpu_on_which_nobody_is_placed_is_seen_by_nobody() -> None:
    assert visible_gpus([D0], ["0", "1", "2"], {}) == {"decode-0": "0"}


def test_a_role_with_gpus_of_its_own_takes_those_in_turn() -> None:
    found = visible_gpus([P0, P1, D0, D1], ["0", "1", "2"], {Role.PREFILL: ("2",), Role.DECODE: ()})
    assert [found[worker].partition(",")[0] for _, worker in (P0, P1, D0, D1)] == ["2", "2", "0", "1"]


def test_where_nobody_knows_the_gpus_workers_see_what_the_launcher_sees() -> None:
    assert visible_gpus([P0, D0], [], {}) == {}


def test_a_worker_on_a_part_of_a_gpu_sees_nothing_else_and_nobody_else_sees_that() -> None:
    part, other = "MIG-1c", "MIG-GPU-5d/1/0"
    found = visible_gpus([P0, P1, D0, D1], ["0", part, "1", other], {})
    assert found == {"prefill-0": "0,1", "prefill-1": part, "decode-0": "1,0", "decode-1": other}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (" 2, 3", ["2", "3"]),
        ("0,-1,1", ["0"]),
        ("GPU-8ab1,MIG-44-2c", ["GPU-8ab1", "MIG-44-2c"]),
        ("MIG-GPU-5d/1/0", ["MIG-GPU-5d/1/0"]),
    ],
)
def test_the_launchers_own_environment_says_which_gpus_there_are(given: str, seen: list[str]) -> None:
    """CUDA sees none of those after -1."""
    assert [gpu.name for gpu in known_gpus({"CUDA_VISIBLE_DEVICES": given})] == seen


@pytest.mark.parametrize("given", ["", " ", "-1", "-1,0"])
def test_an_environment_that_hides_every_gpu_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES: hides every GPU, got '{given}'"):
        known_gpus({"CUDA_VISIBLE_DEVICES": given})


@pytest.mark.parametrize(("given", "wrong"), [("first", "'first'"), ("0,,1", "''"), ("MIG-GPU-5d/1", "'MIG-GPU-5d/1'")])
def test_an_environment_that_names_no_gpu_is_refused_by_name(given: str, wrong: str) -> None:
    """CUDA would see only those before it."""
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES: a GPU is named by its index or UUID, got {wrong}"):
        known_gpus({"CUDA_VISIBLE_DEVICES": given})


LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-1a)
GPU 1: NVIDIA H200 (UUID: GPU-2b)
  MIG 3g.71gb     Device  0: (UUID: MIG-3c)
  MIG 3g.71gb     Device  1: (UUID: MIG-4d)
"""


def test_else_the_driver_says_it_and_of_a_split_gpu_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{LISTING}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert known_gpus({}) == (Gpu("0", "GPU-1a"), Gpu("MIG-3c"), Gpu("MIG-4d"))
    program.write_text("#!/bin/sh\nexit 9\n")
    assert known_gpus({}) == ()


def test_a_gpu_goes_by_its_index_its_uuid_or_the_beginning_of_that() -> None:
    known = [Gpu("0", "GPU-1a-7"), Gpu("1", "GPU-1b-8"), Gpu("MIG-3c")]
    for name, meant in {"1": "1", "GPU-1b-8": "1", "GPU-1b": "1", "MIG-3": "MIG-3c"}.items():
        assert checked_gpus("--gpus", [name], known) == (meant,)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["first"], r"--gpus: a GPU is named by its index or UUID, got 'first'"),
        (["-1"], r"--gpus: a GPU is named by its index or UUID, got '-1'"),
        (["\u0663"], r"--gpus: a GPU is named by its index or UUID"),
        (["00"], r"--gpus: a GPU is named by its index or UUID, got '00'"),
        (["0", "4"], r"--gpus: there is no GPU 4 here, only 0, 1"),
        (["1", "1"], r"--gpus: names GPU 1 twice"),
        (["1", "GPU-1b"], r"--gpus: names GPU GPU-1b twice"),
        (["GPU-1"], r"--gpus: there is more than one GPU GPU-1 here, only 0, 1"),
        (["GPU-2"], r"--gpus: there is no GPU GPU-2 here, only 0, 1"),
        (["MIG-3c"], r"--gpus: there is no GPU MIG-3c here, only 0, 1"),
        ([""], r"--gpus: a GPU is named by its index or UUID, got ''"),
    ],
)
def test_a_wrong_gpu_is_refused_by_name(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_gpus("--gpus", names, [Gpu("0", "GPU-1a"), Gpu("1", "GPU-1b")])


def test_where_the_gpus_are_unknown_a_name_is_taken_as_it_is() -> None:
    assert checked_gpus("decode.gpus", ["7", "GPU-8ab1-2c"], []) == ("7", "GPU-8ab1-2c")
