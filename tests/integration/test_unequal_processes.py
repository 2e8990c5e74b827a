"""A fleet of processes whose workers have blocks of unequal sizes, asked through the gateway."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from baton.core.types import GenerateRequest, PrefillMode, Role, Sampling, StopRules, TokenRequest
from tests.answers import tokens
from tests.faults.deployment import deployment
from tests.stack import Stack

SERVICES = (
    (Role.PREFILL, "prefill-0"),
    (Role.DECODE, "decode-0"),
    (Role.DECODE, "decode-1"),
    (Role.PLANNER, "planner-0"),
    (Role.GATEWAY, "gateway-0"),
)
SIZES = {"prefill-0": 16, "decode-0": 32, "decode-1": 8}
PROMPTS = (1, 8, 31, 32, 33, 100, 190, 333)


def asked(wanted: TokenRequest) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=wanted.prompt,
        max_tokens=wanted.stop.max_tokens,
        sampling=Sampling(temperature=wanted.sampling.temperature),
        seed=wanted.sampling.seed,
        stop=StopRules(ignore_eos=True),
        timeout=60,
    )


def test_workers_with_blocks_of_unequal_sizes_serve_together(tmp_path: Path) -> None:
    """The fake engines decode from the right bytes only. The second time each prompt goes on, with what came before in
    the caches."""
    first = [tokens(length, request_id=f"r{length}", first=length, seed=length) for length in PROMPTS]
    rounds = (first, [replace(each, prompt=(*each.prompt, *range(3, 60))) for each in first])

    async def main() -> None:
        sizes = {name: [f"engine.block_size={size}"] for name, size in SIZES.items()}
        only = "kvtransfer.transports=shm"  # what does not come this way is computed by the decode worker, and seen
        async with deployment(tmp_path, only, services=SERVICES, of_one=sizes) as found:
            workers = await found.workers()
            assert {name: record.card and record.card.format.block_size for name, record in workers.items()} == SIZES
            used: set[str] = set()
            for wanted in rounds:
                answers = await asyncio.gather(*(found.client.ask(asked(each)) for each in wanted))
                for each, answer in zip(wanted, answers, strict=True):
                    choice = answer.choices[0]
                    assert choice.token_ids == (await Stack().alone(each)).token_ids
                    assert choice.placement.prefill_mode is PrefillMode.REMOTE
                    used.add(choice.placement.decode_worker)
            assert used == {"decode-0", "decode-1"}
            await found.assert_sound()

    asyncio.run(main())
