"""What a request costs, through a whole stack: by the price book, in the ledger, of what its last message says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from baton.client import Client
from baton.core.types import Limits, StopRules
from tests.launched import prompt_request, running_stack
from tests.tenants import tenants_at

BOOK = """
[models.fake]
input = "3"
cached = "0.5"
output = "7"
"""
ASK = replace(prompt_request(range(10, 50), 6), stop=StopRules(ignore_eos=True))  # two full blocks and some tokens
MICRO = 10**6  # the units of a cost in a millionth of the currency


def test_computed_cached_and_output_tokens_are_charged_by_the_price_book(tmp_path: Path) -> None:
    book = tmp_path / "prices.toml"
    book.write_text(BOOK)

    async def main() -> None:
        async with (
            running_stack("fake", f"gateway.prices_file={book}", prefill=0) as running,
            tenants_at(running) as tenants,
            Client(running.stack.record.gateway, await tenants.made("acme", Limits())) as client,
        ):
            usages = [(await client.ask(replace(ASK, request_id=name))).choices[0].usage for name in ("a", "b")]
            assert [usage.cached_tokens for usage in usages] == [0, 32]
            await tenants.settled("acme")
            charged = {entry.request_id: entry for entry in await tenants.charged("acme")}
            for name, usage in zip("ab", usages, strict=True):
                entry, cached = charged[name], usage.cached_tokens
                assert (entry.input_tokens, entry.cached_tokens) == (usage.prompt_tokens, cached) == (40, cached)
                assert entry.output_tokens == usage.completion_tokens == 6
                assert entry.cost == ((40 - cached) * 3 + 6 * 7) * MICRO + cached * MICRO // 2
            await running.assert_idle()

    asyncio.run(main())
