"""What the command line refuses, and with which words."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from baton.cli.main import build_parser, main

TINY = Path(__file__).parents[2] / "data" / "tiny" / "llama-gqa-tied"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("up --colour red", "unrecognized arguments: --colour"),
        ("up --prefil 2", "unrecognized arguments: --prefil"),
        ("model convert x.gguf --out y", "unrecognized arguments: --out"),
        ("model warm --device cpu", "argument --device: invalid choice: 'cpu'"),
        ("up --prefill -1", "--prefill: must be an integer from 0 to 64, got '-1'"),
        ("up --decode many", "--decode: must be an integer from 0 to 64, got 'many'"),
        ("generate --prompt-ids 1 --concurrency 0", "--concurrency: must be an integer from 1 to 4096, got '0'"),
        ("generate", "one of the arguments --prompt-ids --text --input is required"),
        ("generate --text a --prompt-ids 1", "not allowed with argument"),
        ("chat \udcff", "argument text: must be UTF-8, got '\\udcff'"),
        ("chat --key= hi", "argument --key: must not be empty, got ''"),
        ("generate --text hi --address=", "argument --address: must not be empty, got ''"),
        ("up --state-dir=", "argument --state-dir: must not be empty, got ''"),
        ("tenant list --state-dir=", "argument --state-dir: must not be empty, got ''"),
        ("serve", "invalid choice: 'serve'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_what_is_no_command_line_is_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("up --prefill 0 --decode 0", "at least one worker is needed, got --prefill 0 --decode 0"),
        ("up --set decode.colour=red", "--set decode.colour: unknown key decode.colour; known are "),
        ("up --set colour=red", "--set takes SECTION.KEY=VALUE, got 'colour=red'"),
        ("up --set engine.block_size=12", "engine.block_size must be a power of two from 1 to 1024, got 12"),
        ("up --set gateway.port=70000", "gateway.port must be between 0 and 65535, got 70000"),
        ("up --set state.url=http://x", "state.url must be a URL with redis://, rediss://, unix://, got 'http://x'"),
        ("up --set state.url=", "state.url must be a URL with redis://, rediss://, unix://, got ''"),
        ("up --set state.url=redis://x:port", "state.url must be a URL with"),
        ("up --set state.lease_seconds=0", "state.lease_seconds must be above 0, got 0.0"),
        ("up --set state.timeout_ms=nan", "state.timeout_ms must be above 0, got nan"),
        ("up --config {tmp}/device.toml", "engine.device: `baton up` sets it, by --device; got 'cuda'"),
        (
            "up --model fake --set engine.model=x",
            "engine.model: `baton up` sets it, by --model; got 'x'",
        ),
        ("up --set gateway.keys_file=k.toml", "gateway.keys_file: `baton up` sets it, by a key for this stack"),
        ("up --model=", "model: '' is neither a known name"),
        ("up --config {tmp}/none.toml", "none.toml: cannot be read: No such file or directory"),
        ("up --config {tmp}/bad.toml", "bad.toml: not valid TOML"),
        ("up --config {tmp}/unknown.toml", "unknown.toml: unknown key engine.colour"),
        ("up --gpus 0", "--gpus: goes with --device cuda, got --device cpu"),
        ("up --device cuda --gpus 0,", "--gpus: a GPU is named by its index or UUID, got ''"),
        ("up --device cuda --gpus=", "--gpus: a GPU is named by its index or UUID, got ''"),
        ("up --device cuda --gpus ,", "--gpus: a GPU is named by its index or UUID, got ''"),
        ("up --model {tmp}/none", "is neither a known name (smollm2-135m-instruct,"),
        ("up --model random:none", "random:none: neither a config.json nor a preset; presets: "),
        ("up --model {tmp}/empty", "config.json: file missing"),
        ("up --model {tmp}/no-weights", "model.safetensors: file missing"),
        ("generate --text a --key k --address http://x:1", "address: must be host:port, such as 127.0.0.1:8600, got"),
        ("generate --text a --key k --address x:99999", "got 'x:99999'"),
        ("generate --prompt-ids 1,x", "--prompt-ids must be integers separated by commas"),
        ("generate --input {tmp}/bad.toml", "--input needs --output"),
        ("generate --prompt-ids 1 --output x", "--output goes with --input"),
        ("chat hello", "nothing runs under {tmp}/state: start it with `baton up --state-dir {tmp}/state`"),
        ("status", "nothing runs under"),
        ("logs", "there are none under"),
        ("bench nothing", "bench: must be one of cpu, offline, quota, serve, transfer, got 'nothing'"),
        ("model fetch nothing", "model 'nothing' is not known; known: smollm2-135m-instruct"),
        ("model convert {tmp}/none.gguf", "none.gguf: no such file"),
        ("model warm --model random:none", "random:none: neither a config.json nor a preset"),
        ("model warm --model random:smollm2-135m --set engine.colour=red", "unknown key engine.colour"),
        ("model warm --model fake", "only a model on backend cuda has kernels to compile, got fake"),
        ("model warm --model random:smollm2-135m --set engine.device=cpu", "on engine.device cpu, engine.backend auto"),
        (
            "model warm --model random:smollm2-135m --set engine.backend=torch",
            "engine.device cuda, engine.backend torch",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("[engine\n")
    (tmp_path / "device.toml").write_text('[engine]\ndevice = "cuda"\n')
    (tmp_path / "unknown.toml").write_text("[engine]\ncolour = 'red'\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_bytes((TINY / "config.json").read_bytes())
    command, *rest = words.format(tmp=tmp_path).split()
    has_state = command in ("up", "generate", "chat", "status", "logs")
    given = [command, "--state-dir", str(tmp_path / "state"), *rest] if has_state else [command, *rest]
    assert main(given) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: ")
    assert said.format(tmp=tmp_path) in line
    assert not (tmp_path / "state").exists()


def test_gpus_that_the_environment_hides_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["up", "--state-dir", str(tmp_path / "state"), "--model", "fake", "--device", "cuda"]) == 2
    assert "CUDA_VISIBLE_DEVICES: hides every GPU, got ''" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == ["baton", version("baton")]


def test_down_without_a_stack_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert "nothing runs under" in capsys.readouterr().err


def test_options_after_a_benchmark_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "cpu", "--repeats", "few"])
    assert ended.value.code == 2
    assert "--repeats: invalid int value: 'few'" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_output_that_fits_nowhere_is_one_line() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "baton.cli.main", "model", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr == "baton: what it prints cannot be written: No space left on device\n"
