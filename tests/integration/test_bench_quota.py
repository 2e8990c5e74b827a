from __future__ import annotations

import json
from pathlib import Path

from baton.cli.main import main


def test_measures_admissions_over_a_real_server(tmp_path: Path) -> None:
    result = tmp_path / "quota.json"
    options = ["--admissions", "40", "--tenants", "3", "--levels", "3", "--gateways", "2", "--at-once", "8"]
    assert main(["bench", "quota", *options, "--save", str(result)]) == 0
    figures = json.loads(result.read_text())["figures"]
    assert figures["latency"]["reserve_ms"]["p50"] > 0
    assert figures["latency"]["settle_ms"]["p99"] > 0
    assert figures["latency"]["balances_ms"]["p50"] > 0 < figures["latency"]["again_reserve_ms"]["p50"]
    assert figures["throughput"]["admissions_per_second"] > 0
    assert figures["memory"]["bytes_per_tenant"] > 0
    assert figures["crowd"]["few_reserve_ms"]["p50"] > 0 < figures["crowd"]["all_reserve_ms"]["p50"]
    assert figures["frozen"]["longest_ms"] > 0
