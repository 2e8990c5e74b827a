from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.config import Section, Settings, describe, flag_settings
from baton.core.errors import ConfigError
from gateway.config import GatewayConfig


def fill(*flags: str) -> GatewayConfig:
    return Settings(flag_settings(flags)).fill(Section("gateway", GatewayConfig))


def test_values_reach_the_limits_that_are_enforced() -> None:
    config = fill("gateway.max_prompt_bytes=1000", "gateway.max_choices=3", "gateway.max_lost_workers=1")
    assert (config.limits.prompt_bytes, config.limits.choices, config.relay.lost_workers) == (1000, 3, 1)
    assert config.policy.limits == config.limits


def test_tokenizers_are_named_directories() -> None:
    assert fill("gateway.tokenizers=a=/x,b=/y=z").tokenizer_directories() == {"a": Path("/x"), "b": Path("/y=z")}


@pytest.mark.parametrize(
    "flag",
    [
        "max_prompt_bytes=67108864",
        "max_prompt_bytes=0",
        "default_max_tokens=0",
        "planner_budget_ms=0",
        "max_lost_workers=-1",
        "quota_lease_seconds=0",
        "quota_renew_seconds=6",
        "tokenizers=nowhere",
        "door_certificate=cert.pem",
        "door_client_ca=ca.pem",
        "no_such_key=1",
    ],
)
def test_a_wrong_value_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match="gateway"):
        fill(f"gateway.{flag}")


def test_the_services_token_does_not_open_the_door_and_does_not_show() -> None:
    config = fill("gateway.service_token=hush")
    assert config.server_policy().token == ""
    assert config.client_security().token == "hush"
    assert "hush" not in describe("gateway", config) + repr(config)
