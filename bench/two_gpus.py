"""``python -m bench.two_gpus``: one prefill and one decode worker on two GPUs, beside two colocated ones.

Parts, of which ``--parts`` names some:

* ``transfer``: copies between the GPUs, whole hand-overs, and what lies between a prompt's last chunk and the first
  decode step, which ``first-steps`` measures alone;
* ``tokens``: small models in float32, answered by a split and by one worker: the same tokens?
* ``split``, ``colocated``, ``unbalanced``: the online runs, at the same rates and with the same seeded arrivals; the
  last one is the split without the balance of its pools. Each system also answers some prompts greedily;
* ``kills``: SIGKILL of the one worker of each role under load.

Everything known is written to ``--output`` after every rate, so that a run cut short keeps its figures. Two processes
with two GPUs each may run at once; ``--merge`` puts their files together and compares the greedy answers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton.cli.subcommands import integer
from baton.cli.terminal import say
from baton.core.errors import ConfigError
from bench.machine import hardware, versions
from bench.random_model import with_context
from bench.shapes import Batch, Range
from bench.two_gpus_faults import SMALL_MODELS, KillPlan, kills, small_tokens
from bench.two_gpus_online import IDLE_OUTPUT, SHAPES, SYSTEMS, Course, agreement, read_answers, run_system
from bench.two_gpus_stack import Shape, Site, clients

COMMAND = "python -m bench.two_gpus"
PARTS = ("transfer", "first-steps", "tokens", *SYSTEMS, "kills")
# Chunks no longer than a GPU needs to be busy: prompts that wait are computed one after another, not side by side.
CUDA_FLAGS = (
    "engine.max_step_tokens=2048",
    "planner.tpot_limit_ms=20",
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    parts: tuple[str, ...]
    site: Site
    course: Course
    kills: KillPlan
    small_models: tuple[str, ...]
    repeats: int
    processes: int
    output: Path
    command: str


class Document:
    """The result so far, on disk after every change: whoever ends the run finds whole JSON."""

    def __init__(self, plan: RunPlan) -> None:
        self._path = plan.output
        self._began = time.monotonic()
        self.values: dict[str, Any] = {
            "command": plan.command,
            "hardware": hardware(),
            "versions": versions(),
            "site": asdict(plan.site),
            "seconds": plan.course.seconds,
            "warm_up": plan.course.warm_up,
            "seed": plan.course.seed,
            "client_processes": plan.processes,
            "parts": {},
            "failures": {},
            "took_seconds": {},
        }
        self.write()

    def note(self, part: str, found: dict[str, Any]) -> None:
        self.values["parts"][part] = found
        self.write()

    def write(self) -> None:
        self.values["took_seconds"]["all"] = round(time.monotonic() - self._began, 1)
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self._path)


async def run(plan: RunPlan) -> dict[str, Any]:
    """Every part, one after another; one that fails is noted, and the others go on."""
    document = Document(plan)
    for part in plan.parts:
        began = time.monotonic()
        say(f"--- {part}")
        try:
            await _part(part, plan, document)
        except Exception as error:  # noqa: BLE001 - the edge: what the other parts find must not be lost
            document.values["failures"][part] = f"{type(error).__name__}: {error}"
            say(f"{part} failed: {document.values['failures'][part]}")
        document.values["took_seconds"][part] = round(time.monotonic() - began, 1)
        document.write()
    return document.values


async def _part(part: str, plan: RunPlan, document: Document) -> None:
    def note(found: dict[str, Any]) -> None:
        document.note(part, found)

    if part in SYSTEMS:
        async with clients(plan.processes) as load:
            await run_system(plan.site, SYSTEMS[part], plan.course, load, note)
    elif part == "kills":
        await kills(plan.site, plan.kills, note)
    elif part == "tokens":
        await small_tokens(plan.site, plan.small_models, note)
    else:
        from bench.two_gpus_transfer import first_steps, transfer  # pulls in torch

        await (transfer if part == "transfer" else first_steps)(plan.site, plan.repeats, note)


def merged(documents: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """One document of several, and how far the systems' greedy answers agree."""
    parts = {name: found for document in documents for name, found in document["parts"].items()}
    answers = {name: read_answers(found["answers"]) for name, found in parts.items() if found.get("answers")}
    first = next(iter(answers), None)
    compared = {f"{first}, {name}": agreement(answers[first], answers[name]) for name in answers if name != first}
    return {
        "command": command,
        "hardware": documents[0]["hardware"],
        "versions": documents[0]["versions"],
        "runs": [{key: value for key, value in each.items() if key != "parts"} for each in documents],
        "greedy_agreement": compared,
        "parts": {
            name: {key: value for key, value in found.items() if key != "answers"} for name, found in parts.items()
        },
    }


# --- command line -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="tokens,transfer,split,colocated,unbalanced,kills", metavar="PART,...")
    parser.add_argument("--gpus", default="0,1", metavar="N,N", help="the two GPUs (the default: 0,1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--model", default="random:llama-3-8b")
    parser.add_argument("--shapes", default="", metavar="RATE:IN/OUT,...", help="instead of the issue's rates")
    parser.add_argument("--seconds", type=float, default=60.0, help="that are judged at each rate")
    parser.add_argument("--warm-up", type=float, default=5.0, metavar="SECONDS", help="before them, at the same rate")
    parser.add_argument("--idle", default="2048,8192", metavar="TOKENS,...", help="prompts of the idle requests")
    parser.add_argument("--seed", type=integer(1, 1 << 16), default=1)
    parser.add_argument("--processes", type=integer(1, 32), default=4, help="of the client")
    parser.add_argument("--repeats", type=integer(1, 1000), default=20, help="of each hand-over")
    parser.add_argument("--kill-trials", type=integer(1, 20), default=1, help="of each role, each with a fresh stack")
    parser.add_argument("--kill-load", default="8:2048/256", metavar="RATE:IN/OUT")
    parser.add_argument("--small-models", default=",".join(SMALL_MODELS), metavar="MODEL,...", help="of tokens")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="flags")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="put results together and end")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON, written again and again")
    return parser


def _shape(text: str) -> Shape:
    try:
        rate, _, lengths = text.partition(":")
        prompt, _, output = lengths.partition("/")
        shape = Shape(float(rate), int(prompt), int(output))
    except ValueError:
        shape = Shape(0.0, 0, 0)
    if shape.rate <= 0 or shape.prompt < 1 or shape.output < 2:
        raise ConfigError(f"a shape is RATE:IN/OUT, with at least 2 tokens out, got {text!r}")
    return shape


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def plan_of(arguments: argparse.Namespace, model: str, command: str) -> RunPlan:
    parts = _words(arguments.parts)
    if not parts or not set(parts) <= set(PARTS):
        raise ConfigError(f"--parts: must be some of {', '.join(PARTS)}, got {arguments.parts!r}")
    on_gpus = arguments.device == "cuda"
    gpus = _words(arguments.gpus) if on_gpus else ()
    if on_gpus and len(gpus) < 2:
        raise ConfigError(f"--gpus: two are needed, got {arguments.gpus!r}")
    kill_load = _shape(arguments.kill_load)
    return RunPlan(
        parts=parts,
        site=Site(arguments.device, gpus, model, (*(CUDA_FLAGS if on_gpus else ()), *arguments.flags)),
        course=Course(
            tuple(map(_shape, _words(arguments.shapes))) or SHAPES,
            arguments.seconds,
            arguments.warm_up,
            arguments.seed,
            tuple(map(int, _words(arguments.idle))),
        ),
        kills=KillPlan(
            kill_load.rate, kill_load.prompt, kill_load.output, 6.0, 6.0, arguments.kill_trials, arguments.seed
        ),
        small_models=_words(arguments.small_models),
        repeats=arguments.repeats,
        processes=arguments.processes,
        output=arguments.output,
        command=command,
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, command = _parser().parse_args(words), shlex.join([*COMMAND.split(), *words])
    if arguments.merge:
        document = merged([json.loads(path.read_text(encoding="utf-8")) for path in arguments.merge], command)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0
    shapes = tuple(map(_shape, _words(arguments.shapes))) or SHAPES
    idle = (int(prompt) + IDLE_OUTPUT for prompt in _words(arguments.idle))
    longest = max(*(shape.prompt + shape.output for shape in shapes), *idle) + 64
    room = [Batch("online", 1, Range(longest, longest), Range(1, 1))]
    with with_context(arguments.model, room) as model:
        document = uvloop.run(run(plan_of(arguments, model, command)))
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
