from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.main import main as baton
from baton.core.errors import ConfigError
from baton.engine.config import EngineConfig
from baton.engine.weights.source import load_spec, weights_hash
from bench.offline import _weight_bytes, plan_of
from bench.random_model import with_context
from bench.roofline import H200, Peak
from bench.shapes import parse_shapes

TINY = Path(__file__).parents[2] / "data" / "tiny" / "llama-gqa-tied"


def test_the_engine_has_room_for_all_requests_of_the_shapes() -> None:
    config = plan_of(["--model", "fake", "--shapes", "batch:1000x1/1,decode:80x1/1"]).config
    assert (config.max_waiting, config.max_running) == (1000, 80)


def test_set_wins_over_that_room_and_a_gpu_has_its_own_defaults() -> None:
    config = plan_of(["--model", "fake", "--device", "cuda", "--set", "engine.max_waiting=3"]).config
    cpu = plan_of(["--model", "fake"]).config
    assert config.max_waiting == 3
    assert config.max_step_tokens > cpu.max_step_tokens


def test_peaks_are_an_h200s_on_cuda_and_unknown_on_a_cpu() -> None:
    assert plan_of(["--model", "fake"]).peak is None
    assert plan_of(["--model", "fake", "--device", "cuda"]).peak == H200
    given = ["--model", "fake", "--device", "cuda", "--peak-flops", "1400"]
    assert plan_of(given).peak == Peak(H200.bytes_per_second, 1400e12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shapes none", "--shapes: must be mixed256"),
        ("--set gateway.port=1", "only keys of the engine's section"),
        ("--set engine.device=cuda", "model and device by options"),
        ("--set engine.block_size=12", "must be a power of two"),
        ("--device tpu", "engine.device must be cpu or cuda, got 'tpu'"),
        ("--peak-flops 3", "--peak-bandwidth and --peak-flops go together"),
        ("--peak-flops -3", "--peak-flops must be above 0"),
        ("--output /nowhere/at/all.json", "--output /nowhere/at/all.json: there is no such directory"),
    ],
)
def test_bad_options_are_named(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(["--model", "fake", *words.split()])
    assert said in raised.value.message


def test_random_weights_take_the_context_that_the_shapes_need() -> None:
    (shape,) = parse_shapes("prefill:8x16384")
    with with_context("random:llama-3-8b", [shape]) as model:
        assert load_spec(model).context_length == 16385
        assert weights_hash(model) == weights_hash("random:llama-3-8b")
        assert Path(model).stem == "llama-3-8b"
    with with_context("random:llama-3-8b", parse_shapes("ttft:16")) as model:
        assert load_spec(model).context_length == 8192


def test_the_context_of_a_model_directory_is_its_own() -> None:
    limit = load_spec(TINY).context_length
    with (
        pytest.raises(ConfigError, match=f"ttft:{limit}: must fit the context of .*, {limit} tokens"),
        with_context(str(TINY), parse_shapes(f"ttft:{limit}")),
    ):
        pass


def test_the_engine_alone_can_be_measured_without_grpc_and_redis() -> None:
    heavy = "{'grpc', 'google.protobuf', 'redis', 'gguf', 'torch'} & set(sys.modules)"
    code = f"import sys, bench.offline; sys.exit(str({heavy}) if {heavy} else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_result_says_how_it_came_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "result.json"
    words = ["offline", "--model", "random:tiny-llama", "--shapes", "batch:3x20/4,decode:2x16/8", "--repeats", "2"]
    words += ["--set", "engine.kv_cache_mb=16", "--peak-bandwidth", "0.03", "--peak-flops", "1"]
    assert baton(["bench", *words, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["command"].startswith("baton bench offline --model random:tiny-llama --shapes batch:3x20/4,")
    assert "--output" not in found["command"]
    assert {"cpu", "cores", "python"} <= set(found["hardware"])
    assert "torch" in found["versions"]
    assert (found["config"]["model"], found["config"]["kv_cache_mb"]) == ("random:tiny-llama", 16)
    assert found["peaks"] == {"bytes_per_second": 0.03e12, "flops_per_second": 1e12}
    batch, decode = found["shapes"]
    assert (batch["headline"], decode["headline"]) == ("output_tokens_per_second", "step_ms")
    for result in (batch, decode):
        figures = sorted(repeat[result["headline"]] for repeat in result["repeats"])
        assert len(figures) == 2
        assert (result["min"], result["max"]) == pytest.approx(figures, rel=1e-3, abs=1e-3)
        assert result["medians"]["roofline"] > 0
    said = capsys.readouterr()
    assert "decode:2x16/8" in said.err
    assert said.out == ""


def test_fp8_weights_count_half_but_the_head_whole() -> None:
    spec = load_spec("random:llama-3-8b")
    half = EngineConfig("random:llama-3-8b", device="cuda", weight_format="fp8")
    head = spec.vocab_size * spec.hidden_size
    weights = 7_504_658_432  # of Llama-3-8B without embedding and norms
    assert _weight_bytes(half, spec) * weights == pytest.approx(weights + head)
    assert _weight_bytes(EngineConfig("random:llama-3-8b"), spec) == 2
