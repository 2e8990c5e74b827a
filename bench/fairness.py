"""``python -m bench.fairness``: what a flooding tenant does to the others, on one engine.

Gold and silver tenants send at a steady rate, first alone, then beside three bronze ones: one floods with ten times
gold's requests, two ask for more than their share. The figures are gold's times to the first token in both, the Jain
index over the bronze tenants' tokens (weighted as they are charged), and the longest wait for admission of anybody.

On the fake model every step takes the same time on a controlled clock, so the figures are exact and come out the same
each time. ``--real`` computes a model on the CPU in real time, at rates that the engine's measured speed allows; there
steps get longer with what is in them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.core.config import Setting, Settings
from baton.core.types import Tier
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.runner import Runner
from baton.engine.sequence import Work
from bench.machine import hardware, versions
from bench.offline import ENGINE, engine_flags
from bench.tenant_load import FixedSteps, LoadTrial, Pace, RealTime, TenantFigures, TenantLoad, jain, quantile

COMMAND = "python -m bench.fairness"
STEP_SECONDS = 0.02
SHARE_OF_STEADY = 0.5  # of the engine's measured speed, that gold and silver ask for together in real time
SPEED_TRIALS = 3
REAL_LENGTHS = 0.125  # of the lengths on the fake model
ENGINE_SETTINGS = {"block_size": 16, "kv_blocks": 2048, "max_step_tokens": 512, "max_running": 32, "max_waiting": 64}

STEADY = {
    Work.DECODE: (TenantLoad("gold", Tier.GOLD, 2, 2048, 64), TenantLoad("silver", Tier.SILVER, 2, 1024, 64)),
    Work.PREFILL: (TenantLoad("gold", Tier.GOLD, 2, 2048, 1), TenantLoad("silver", Tier.SILVER, 2, 1024, 1)),
}
CROWD = {
    Work.DECODE: (
        TenantLoad("bronze-flood", Tier.BRONZE, 20, 512, 128),
        TenantLoad("bronze-2", Tier.BRONZE, 6, 512, 128),
        TenantLoad("bronze-3", Tier.BRONZE, 6, 256, 160),
    ),
    Work.PREFILL: (
        TenantLoad("bronze-flood", Tier.BRONZE, 20, 1024, 1),
        TenantLoad("bronze-2", Tier.BRONZE, 9, 1024, 1),
        TenantLoad("bronze-3", Tier.BRONZE, 16, 640, 1),
    ),
}


@dataclass(frozen=True, slots=True)
class Fairness:
    """``ttft`` in seconds, gold's: the p99 alone and beside the crowd. ``longest_wait`` in seconds by tenant."""

    ttft_alone: float
    ttft_crowded: float
    ttft_rise: float
    jain: float
    longest_wait: dict[str, float]
    preemptions: int
    alone: dict[str, TenantFigures]
    crowded: dict[str, TenantFigures]

    def as_json(self) -> dict[str, object]:
        return {
            **{key: value for key, value in asdict(self).items() if key not in ("alone", "crowded")},
            "tenants_alone": {name: summary(one) for name, one in self.alone.items()},
            "tenants": {name: summary(one) for name, one in self.crowded.items()},
        }


def summary(figures: TenantFigures) -> dict[str, float]:
    return {
        "sent": figures.sent,
        "refused": figures.refused,
        "finished": figures.finished,
        "prompt_tokens": figures.prompt,
        "drawn_tokens": figures.drawn,
        "ttft_p50": quantile(figures.ttfts, 0.5),
        "ttft_p99": quantile(figures.ttfts, 0.99),
    }


class FairnessTrial:
    """Both loads on fresh engines of one kind."""

    def __init__(self, config: EngineConfig, work: Work, *, seconds: float, seed: int) -> None:
        self._config = config
        self._work = work
        self._seconds = seconds
        self._seed = seed

    def on_fake(self, *, steps_ahead: int) -> Fairness:
        card = fake_card(block_size=self._config.block_size)
        runner = FakeRunner(card, self._config.kv_blocks, steps_ahead=steps_ahead)
        again = FakeRunner(card, self._config.kv_blocks, steps_ahead=steps_ahead)
        steady, crowd = STEADY[self._work], CROWD[self._work]
        alone = self._run(runner, steady, FixedSteps(STEP_SECONDS))
        return self._compare(alone, self._run(again, steady + crowd, FixedSteps(STEP_SECONDS)))

    def on_real(self, runner: Runner) -> Fairness:
        """One runner for all: its pool is empty again after each load, but for cached blocks, which no prompt hits."""
        steady, crowd = _shortened(STEADY[self._work]), _shortened(CROWD[self._work])
        trials = [self._trial(runner, steady + crowd, RealTime(), judged_from=0.0) for _ in range(SPEED_TRIALS)]
        speed = max(trial.speed(self._config.max_waiting) for trial in trials)
        factor = SHARE_OF_STEADY * speed / sum(load.rate * (load.prompt + load.output) for load in steady)
        steady, crowd = _faster(steady, factor), _faster(crowd, factor)
        alone = self._run(runner, steady, RealTime())
        return self._compare(alone, self._run(runner, steady + crowd, RealTime()))

    def _run(self, runner: Runner, loads: Sequence[TenantLoad], pace: Pace) -> LoadTrial:
        trial = self._trial(runner, loads, pace, judged_from=self._seconds / 5)
        trial.run(self._seconds)
        return trial

    def _trial(self, runner: Runner, loads: Sequence[TenantLoad], pace: Pace, *, judged_from: float) -> LoadTrial:
        return LoadTrial(runner, self._config, loads, pace, work=self._work, seed=self._seed, judged_from=judged_from)

    def _compare(self, alone: LoadTrial, crowded: LoadTrial) -> Fairness:
        before, after = (quantile(trial.figures["gold"].ttfts, 0.99) for trial in (alone, crowded))
        config = self._config
        charged = [
            one.prompt * config.prompt_token_weight + one.drawn * config.output_token_weight
            for name, one in crowded.figures.items()
            if name.startswith("bronze")
        ]
        return Fairness(
            before,
            after,
            after / before - 1,
            jain(charged),
            {name: max(one.waits, default=0.0) for name, one in crowded.figures.items()},
            crowded.core.stats.preemptions,
            alone.figures,
            crowded.figures,
        )


def _shortened(loads: Sequence[TenantLoad]) -> tuple[TenantLoad, ...]:
    return tuple(
        replace(load, prompt=max(1, int(load.prompt * REAL_LENGTHS)), output=max(1, int(load.output * REAL_LENGTHS)))
        for load in loads
    )


def _faster(loads: Sequence[TenantLoad], factor: float) -> tuple[TenantLoad, ...]:
    return tuple(replace(load, rate=load.rate * factor) for load in loads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, allow_abbrev=False)
    parser.add_argument("--work", choices=[work.value for work in Work], default="decode", help="answers, or prefills")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load, of the engine's clock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps-ahead", type=int, choices=[0, 1], default=0, help="of the fake model")
    parser.add_argument("--real", action="store_true", help="compute --model on the CPU, in real time")
    parser.add_argument("--model", default="random:tiny-llama")
    parser.add_argument("--set", action="append", default=[], metavar="engine.KEY=VALUE")
    parser.add_argument("--save", type=Path, help="write the JSON here instead of printing it")
    return parser


def main() -> None:
    options = _parser().parse_args()
    base = [Setting("engine", key, value, COMMAND) for key, value in ENGINE_SETTINGS.items()]
    model = [Setting("engine", "model", options.model if options.real else "fake", "--model")]
    config = Settings([*base, *model, *engine_flags(options.set)]).fill(ENGINE)
    trial = FairnessTrial(config, Work(options.work), seconds=options.seconds, seed=options.seed)
    if options.real:
        from baton.engine.load import build_runner  # the fake needs no torch

        found = trial.on_real(build_runner(config))
    else:
        found = trial.on_fake(steps_ahead=options.steps_ahead)
    result = {
        "command": shlex.join([*COMMAND.split(), *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "tiers": list(config.tiers),
        **found.as_json(),
    }
    text = json.dumps(result, indent=2)
    if options.save is None:
        sys.stdout.write(text + "\n")
    else:
        options.save.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
