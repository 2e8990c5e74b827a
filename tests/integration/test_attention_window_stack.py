"""The planner's attention window through gateway, planner and worker processes, hand-over included."""

from __future__ import annotations

import asyncio

from baton.cli.ask import ask
from baton.cli.cases import Case
from baton.core.clock import SystemClock
from baton.core.types import GenerateRequest, PrefillMode, StopRules, TokenRequest
from tests.goldens import DATA
from tests.launched import running_stack
from tests.real_engines import alone, prompt

NAME = "llama-gqa-tied"
WINDOW = 40
FLAGS = (
    f"planner.attention_window={WINDOW}",
    "planner.local_prefill_max_tokens=60",
    "gateway.planner_budget_ms=10000",
    "engine.dtype=float32",
    "engine.kv_blocks=96",
)
# Longer than the window and handed over, longer and computed by decode itself, not longer.
LENGTHS = {130: (WINDOW, PrefillMode.REMOTE), 50: (WINDOW, PrefillMode.LOCAL), WINDOW: (None, PrefillMode.LOCAL)}


def test_longer_prompts_are_answered_as_with_the_window_and_shorter_ones_as_without() -> None:
    stop = StopRules(24, ignore_eos=True)
    truths = {
        length: alone(NAME, TokenRequest("alone", prompt(length, length), stop=stop, attention_window=window))
        for length, (window, _) in LENGTHS.items()
    }
    whole = alone(NAME, TokenRequest("alone", prompt(130, 130), stop=stop))
    assert truths[130].token_ids != whole.token_ids

    async def main() -> None:
        async with running_stack(str(DATA / "tiny" / NAME), *FLAGS) as running:
            for length, (_, mode) in LENGTHS.items():
                request = GenerateRequest(
                    prompt_token_ids=prompt(length, length), max_tokens=24, stop=StopRules(ignore_eos=True), timeout=600
                )
                [line] = await ask(running.client, Case(f"length {length}", request), SystemClock())
                assert tuple(line.token_ids) == truths[length].token_ids, length
                assert line.placement is not None and line.placement.prefill_mode is mode
            await running.assert_idle()

    asyncio.run(main())
