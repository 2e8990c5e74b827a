"""The run on two GPUs: what it is told, what it writes, and what it compares."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from bench import two_gpus
from bench.two_gpus import RunPlan, main, merged, plan_of, run
from bench.two_gpus_online import SHAPES, agreement
from bench.two_gpus_stack import Shape


def plan(tmp_path: Path, *words: str) -> RunPlan:
    arguments = two_gpus._parser().parse_args([*words, "--output", str(tmp_path / "result.json")])
    return plan_of(arguments, "random:llama-3-8b", "command")


def test_by_default_all_parts_run_at_all_rates(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert set(made.parts) == {"transfer", "tokens", "split", "colocated", "unbalanced", "kills"}
    assert tuple(made.course.shapes) == SHAPES
    assert {(s.rate, s.prompt) for s in SHAPES} == {(r, 2048) for r in (8, 12, 16, 20)} | {(r, 8192) for r in (2, 3, 4)}


def test_parts_gpus_and_rates_can_be_named(tmp_path: Path) -> None:
    made = plan(tmp_path, "--parts", "split,kills", "--gpus", "2,3", "--shapes", "1.5:100/20,2:50/10")
    assert made.parts == ("split", "kills")
    assert made.site.gpus == ("2", "3")
    assert made.course.shapes == (Shape(1.5, 100, 20), Shape(2.0, 50, 10))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "split,else"), r"--parts: must be some of"),
        (("--gpus", "1"), r"--gpus: two are needed, got '1'"),
        (("--shapes", "8:2048"), r"a shape is RATE:IN/OUT"),
    ],
)
def test_a_wrong_word_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, *words)


def test_a_part_that_fails_leaves_the_others_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def part(name: str, plan: RunPlan, document: two_gpus.Document) -> None:
        document.note(name, {"seen": True})
        if name == "tokens":
            raise RuntimeError("no GPU")

    monkeypatch.setattr(two_gpus, "_part", part)
    made = plan(tmp_path, "--parts", "tokens,kills")
    asyncio.run(run(made))
    written = json.loads(made.output.read_text())
    assert written["failures"] == {"tokens": "RuntimeError: no GPU"}
    assert set(written["parts"]) == {"tokens", "kills"}


def test_results_of_two_runs_are_merged_and_their_answers_compared(tmp_path: Path) -> None:
    def document(name: str, answers: list[str]) -> dict[str, Any]:
        return {"hardware": {}, "versions": {}, "command": name, "parts": {name: {"answers": answers, "rates": []}}}

    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(document("split", ["1,2,3,4", "5,6,7,8"])))
    files[1].write_text(json.dumps(document("colocated", ["1,2,3,4", "5,6,9,8"])))
    output = tmp_path / "merged.json"
    assert main(["--merge", *map(str, files), "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["greedy_agreement"] == {"split, colocated": {"answers": 2, "equal": 1, "leading_tokens_equal": 0.75}}
    assert found["parts"] == {"split": {"rates": []}, "colocated": {"rates": []}}
    assert [each["command"] for each in found["runs"]] == ["split", "colocated"]


def test_a_run_without_answers_is_merged_too() -> None:
    documents: list[dict[str, Any]] = [{"hardware": {}, "versions": {}, "parts": {"kills": {"roles": {}}}}]
    assert merged(documents, "c")["greedy_agreement"] == {}


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    assert agreement([(1, 2, 3)], [(1, 9, 3)]) == {"answers": 1, "equal": 0, "leading_tokens_equal": 0.3333}
