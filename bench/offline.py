"""``baton bench offline``: the bare engine in a process of its own, as a worker runs it, measured over shapes.

Every prompt is random and new, EOS is ignored, and the seed fixes prompts and lengths. The result is one JSON document
with the command, hardware, versions, the engine's configuration and every repeat.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton.cli.subcommands import integer
from baton.cli.terminal import say, table
from baton.core.clock import SystemClock
from baton.core.config import Section, Setting, Settings, flag_settings
from baton.core.errors import ConfigError
from baton.core.types import ModelCard, Sampling
from baton.engine.client import spawn_engine
from baton.engine.config import EngineConfig, device_defaults
from baton.engine.spec import DecoderSpec
from baton.engine.weights.source import load_spec
from bench.engine_bench import EngineBench, Roofline
from bench.machine import hardware, versions
from bench.metrics import spread
from bench.prompts import RandomPrompts
from bench.random_model import FAKE, with_context
from bench.roofline import H200, ModelWork, Peak
from bench.shapes import NAMED, SPECULATION, Batch, DecodeStep, Repeat, Shape, parse_shapes

COMMAND = "baton bench offline"
ENGINE = Section("engine", EngineConfig, device_defaults)
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """What to measure, and how often."""

    config: EngineConfig
    shapes: tuple[Shape, ...]
    repeats: int
    seed: int
    sampling: Sampling
    peak: Peak | None
    output: Path | None
    command: str


async def run(plan: OfflinePlan, model: str) -> dict[str, Any]:
    """Measure every shape on one engine. The output file is written anew after each shape, so that none is lost."""
    config = dataclasses.replace(plan.config, model=model, served_name=plan.config.served_name or plan.config.model)
    clock = SystemClock()
    async with spawn_engine(config, on_progress=say) as engine:
        document = _head(plan, engine.card)
        results: list[dict[str, object]] = []
        document["shapes"] = results
        prompts = RandomPrompts(engine.card.vocab_size, plan.seed)
        bench = EngineBench(
            engine, prompts, clock, sampling=plan.sampling, roofline=_roofline(plan, config, engine.card)
        )
        await bench.warm_up()
        for shape in plan.shapes:
            repeats = [await bench.measure(shape) for _ in range(plan.repeats)]
            results.append(_summary(shape, repeats))
            _write(plan.output, document)
            say(_line(results[-1]))
    return document


def _head(plan: OfflinePlan, card: ModelCard) -> dict[str, Any]:
    peak = None if plan.peak is None else dataclasses.asdict(plan.peak)
    return {
        "command": plan.command,
        "hardware": hardware(),
        "versions": versions(),
        "config": dataclasses.asdict(plan.config),
        "model": {
            "architecture": card.architecture,
            "context_length": card.context_length,
            "kv_format": str(card.format),
            "kv_bytes_per_token": card.format.block_bytes // card.format.block_size,
        },
        "sampling": dataclasses.asdict(plan.sampling),
        "seed": plan.seed,
        "peaks": peak,
    }


def _roofline(plan: OfflinePlan, config: EngineConfig, card: ModelCard) -> Roofline | None:
    if plan.peak is None or config.model == FAKE:
        return None
    kv_bytes = card.format.block_bytes / card.format.block_size
    spec = load_spec(config.model)
    return Roofline(ModelWork(spec, _weight_bytes(config, spec), kv_bytes), plan.peak)


def _weight_bytes(config: EngineConfig, spec: DecoderSpec) -> float:
    """Of a weight, on average over those that a step reads: with FP8 weights, the head's are not."""
    wide = WEIGHT_BYTES[config.dtype]
    if config.weight_format == "auto":
        return wide
    layer = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.ffn_size)
    layers, head = spec.layers * layer, spec.vocab_size * spec.hidden_size
    return (layers + wide * head) / (layers + head)


def headline(shape: Shape) -> str:
    """The figure that a shape is known by."""
    if isinstance(shape, DecodeStep):
        return "step_ms"
    if isinstance(shape, Batch):
        return "prompt_tokens_per_second" if shape.output.high == 1 else "output_tokens_per_second"
    return "speedup" if isinstance(shape, Repeat) else "ttft_ms"


def _summary(shape: Shape, repeats: Sequence[dict[str, float]]) -> dict[str, object]:
    """Median and spread of the shape's own figure, medians of the others, and every repeat."""
    name = headline(shape)
    common = [key for key in repeats[0] if all(key in repeat for repeat in repeats)]
    figures = {key: _rounded(statistics.median(repeat[key] for repeat in repeats)) for key in common}
    return {
        "shape": shape.name,
        "headline": name,
        **spread([repeat[name] for repeat in repeats]),
        "medians": figures,
        "repeats": [{key: _rounded(value) for key, value in repeat.items()} for repeat in repeats],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _line(result: dict[str, object]) -> str:
    return f"{result['shape']}: {result['headline']} {result['median']} ({result['min']} to {result['max']})"


def _write(output: Path | None, document: dict[str, Any]) -> None:
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def show(document: dict[str, Any]) -> str:
    """The results as a table."""
    columns = ("roofline", "mfu", "mbu", "host_ms_per_step", "device_idle_share")
    rows: list[list[str]] = []
    for result in document["shapes"]:
        medians = result["medians"]
        figures = [f"{medians[name]:.3f}" if name in medians else "-" for name in columns]
        rows.append([result["shape"], result["headline"], str(result["median"]), *figures])
    return table(("shape", "figure", "median", *columns), rows)


# --- command line -----------------------------------------------------------------------------------------------------


def engine_config(model: str, device: str, flags: Sequence[str], shapes: Sequence[Shape]) -> EngineConfig:
    """The engine's settings: its defaults, with room for all requests of the shapes where ``--set`` says nothing else,
    and without a target for steps, since nobody reads along. The environment does not count, so that a result's command
    says everything."""
    given = engine_flags(flags)
    options = [Setting("engine", "model", model, "--model"), Setting("engine", "device", device, "--device")]
    settings = Settings([*options, *given])
    config = settings.fill(ENGINE)
    needed = {
        "max_waiting": max(shape.requests for shape in shapes),
        "max_running": max((shape.requests for shape in shapes if isinstance(shape, DecodeStep)), default=1),
    }
    raised = {
        key: max(getattr(config, key), least) for key, least in needed.items() if settings.last("engine", key) is None
    }
    if settings.last("engine", "tpot_target_ms") is None:
        config = dataclasses.replace(config, tpot_target_ms=0.0)
    return dataclasses.replace(config, **raised)


def engine_flags(flags: Sequence[str]) -> list[Setting]:
    """Values of ``--set`` for an engine whose model and device are options of their own."""
    given = flag_settings(flags)
    for setting in given:
        if setting.section != "engine" or setting.key in ("model", "device"):
            raise ConfigError(
                f"{setting.origin}: only keys of the engine's section may be set here, model and device by options"
            )
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a model directory, random:CONFIG or fake")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument(
        "--shapes",
        default=",".join(NAMED),
        help=f"separated by commas: {', '.join(NAMED)} (all without it), {', '.join(SPECULATION)}, or "
        "batch:NxIN/OUT, prefill:NxIN, decode:NxIN/OUT, ttft:IN, repeat:NxIN/OUT",
    )
    parser.add_argument("--set", action="append", default=[], metavar="engine.KEY=VALUE", dest="flags")
    parser.add_argument("--repeats", type=integer(1, 1000), default=3)
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=1, help="of prompts and lengths")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, draws greedily")
    parser.add_argument("--peak-bandwidth", type=float, metavar="TB/S", help="of memory; on cuda that of an H200, 4.26")
    parser.add_argument("--peak-flops", type=float, metavar="TFLOP/S", help="of matmul; on cuda bf16 on an H200, 768")
    parser.add_argument("--output", type=Path, help="JSON file to write; standard output without it")
    return parser


def _peak(arguments: argparse.Namespace) -> Peak | None:
    """The given peaks; an H200's where none is given on cuda; None on a CPU, of which nothing is known."""
    bandwidth, flops = arguments.peak_bandwidth, arguments.peak_flops
    for option, value in (("--peak-bandwidth", bandwidth), ("--peak-flops", flops)):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{option} must be above 0 and below 1e9, got {value}")
    if arguments.device.startswith("cuda"):
        return Peak(
            H200.bytes_per_second if bandwidth is None else 1e12 * bandwidth,
            H200.flops_per_second if flops is None else 1e12 * flops,
        )
    if bandwidth is None and flops is None:
        return None
    if bandwidth is None or flops is None:
        raise ConfigError("--peak-bandwidth and --peak-flops go together, got one of them")
    return Peak(1e12 * bandwidth, 1e12 * flops)


def _measured(argv: Sequence[str]) -> list[str]:
    """The arguments without where the result goes, which says nothing about the measurement."""
    kept = [word for word in argv if not word.startswith("--output=")]
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    return kept


def plan_of(argv: Sequence[str]) -> OfflinePlan:
    arguments = _parser().parse_args(argv)
    shapes = parse_shapes(arguments.shapes)
    output: Path | None = arguments.output
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no such directory")
    return OfflinePlan(
        config=engine_config(arguments.model, arguments.device, arguments.flags, shapes),
        shapes=tuple(shapes),
        repeats=arguments.repeats,
        seed=arguments.seed,
        sampling=Sampling(temperature=arguments.temperature, seed=arguments.seed),
        peak=_peak(arguments),
        output=output,
        command=shlex.join([*COMMAND.split(), *_measured(argv)]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    plan = plan_of(sys.argv[1:] if argv is None else argv)
    with with_context(plan.config.model, plan.shapes) as model:
        document = uvloop.run(run(plan, model))
    if plan.output is None:
        print(json.dumps(document, indent=1))
    say(show(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
