"""The open-loop benchmark against a whole stack, with its client in one process and in two."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.launched import running_stack


async def bench(gateway: str, key: str, save: Path, *words: str) -> dict[str, object]:
    shape = ["--rate", "25", "--warmup", "0.5", "--duration", "2", "--input", "40", "--output", "6"]
    command = ["-m", "baton.cli.main", "bench", "serve", "--gateway", gateway, "--key", key, "--save", str(save)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, *shape, *words)
    assert await process.wait() == 0
    return json.loads(save.read_text())


def test_every_request_of_an_open_loop_is_accounted_for(tmp_path: Path) -> None:
    async def main() -> list[dict[str, object]]:
        async with running_stack("fake", prefill=0) as running:
            where = (running.stack.record.gateway, running.stack.record.key, tmp_path / "result.json")
            found = [await bench(*where), await bench(*where, "--processes", "2")]
            await running.assert_idle()
            return found

    for document in asyncio.run(main()):
        result = document["result"]
        assert isinstance(result, dict)
        assert result["requests"] > 20  # 50 are due on average; the seed decides
        assert result["goodput_per_second"] == result["offered_per_second"] == result["requests"] / 2
        assert (result["errors"], result["unfinished"], result["cached_tokens"]) == ({}, 0, 0)
        assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
        assert result["tpot_ms"] is not None
