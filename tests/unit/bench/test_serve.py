from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from bench.metrics import Objectives, Window
from bench.open_loop import Poisson, Trace
from bench.serve import plan_of

DOOR = ["--gateway", "127.0.0.1:1", "--key", "secret-key"]


def test_the_options_of_a_poisson_run() -> None:
    phases = ["--duration", "30", "--warmup", "0"]
    lengths = ["--input", "100", "--output", "20"]
    plan = plan_of([*DOOR, "--rate", "8", *phases, *lengths, "--slo-ttft-ms", "500", "--slo-tpot-ms", "20"])
    assert plan.source == Poisson(8.0, 100, 20)
    assert plan.window == Window(0.0, 30.0)
    assert plan.objectives == Objectives(500.0, 20.0)
    assert (plan.door.address, plan.door.key, plan.door.ca) == ("127.0.0.1:1", "secret-key", None)


def test_no_run_has_the_prompts_of_another_unless_it_is_told_to() -> None:
    first, second = (plan_of([*DOOR, "--rate", "1"]) for _ in range(2))
    assert first.seed == second.seed
    assert first.prompt_seed != second.prompt_seed
    assert plan_of([*DOOR, "--rate", "1", "--prompt-seed", "7"]).prompt_seed == 7


@pytest.mark.parametrize("spelling", [["--key", "secret-key"], ["--key=secret-key"]])
def test_the_key_is_not_in_the_result(spelling: list[str]) -> None:
    plan = plan_of(["--gateway", "127.0.0.1:1", *spelling, "--rate", "1"])
    assert "secret-key" not in plan.command
    assert plan.command.endswith("--rate 1")


def test_a_trace_must_last_as_long_as_it_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * at, "input_length": 64, "output_length": 8} for at in range(31)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = ["--trace", str(path), "--scale", "0.5", "--speed", "2", "--warmup", "5"]
    plan = plan_of([*DOOR, *trace, "--duration", "10"])
    assert isinstance(plan.source, Trace)
    assert (plan.source.recorded[-1].at, plan.source.recorded[0].prompt) == (15.0, 32)
    with pytest.raises(ConfigError, match="must end within the trace, 15 seconds at this speed, got 16"):
        plan_of([*DOOR, *trace, "--duration", "11"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "one of the arguments --rate --trace is required"),
        ("--rate 0", "--rate: must be a number above 0 and below 1e9, got '0'"),
        ("--rate 1 --trace x", "not allowed with argument"),
        ("--rate 1 --input 0", "--input: must be an integer from 1"),
        ("--rate 1 --duration nan", "--duration: must be a number above 0"),
    ],
)
def test_bad_options_are_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_of([*DOOR, *words.split()])
    assert said in capsys.readouterr().err


def test_without_a_gateway_there_must_be_a_local_stack(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing runs under"):
        plan_of(["--state-dir", str(tmp_path), "--rate", "1"])
