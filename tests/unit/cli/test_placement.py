"""Workers get their GPUs from the launcher: their own first, then those of the workers whose pools they map."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.placement import checked_gpus, known_gpus, visible_gpus
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


def test_the_launchers_own_environment_says_which_gpus_there_are() -> None:
    assert known_gpus({"CUDA_VISIBLE_DEVICES": " 2, 3"}) == ("2", "3")
    assert known_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize(("given", "seen"), [("-1", ()), ("0,-1,1", ("0",))])
def test_of_the_gpus_in_the_environment_those_after_the_end_mark_are_not_there(
    given: str, seen: tuple[str, ...]
) -> None:
    assert known_gpus({"CUDA_VISIBLE_DEVICES": given}) == seen


def test_else_the_driver_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert known_gpus({}) == ("0", "1")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert known_gpus({}) == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["first"], r"--gpus: a GPU is named by its index or UUID, got 'first'"),
        (["-1"], r"--gpus: a GPU is named by its index or UUID, got '-1'"),
        (["\u0663"], r"--gpus: a GPU is named by its index or UUID"),
        (["00"], r"--gpus: a GPU is named by its index or UUID, got '00'"),
        (["0", "4"], r"--gpus: there is no GPU 4 here, only 0, 1"),
        (["1", "1"], r"--gpus: names GPU 1 twice"),
    ],
)
def test_a_wrong_gpu_is_refused_by_name(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_gpus("--gpus", names, ["0", "1"])


def test_where_the_gpus_are_unknown_a_name_is_taken_as_it_is() -> None:
    assert checked_gpus("decode.gpus", ["7", "GPU-8ab1-2c"], []) == ("7", "GPU-8ab1-2c")
