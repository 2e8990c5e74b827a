from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, Unauthenticated
from baton.core.tenancy import allows_model
from baton.core.types import AdminRole, Tier
from gateway.keys import ApiKey, KeyRing, dump_keys, load_keys, new_key, new_server_secret

SECRET = "5" * 64


def test_a_key_names_its_tenant_and_salts_differ_between_tenants() -> None:
    first, stored_first = new_key("a", "acme")
    second, stored_second = new_key("b", "zeta")
    ring = KeyRing(SECRET, [stored_first, stored_second])
    acme, zeta = ring.authenticate(first), ring.authenticate(second)
    assert (acme.tenant, acme.key_id, zeta.tenant) == ("acme", "a", "zeta")
    assert acme.salt != zeta.salt
    assert len(acme.salt) == 16


def test_salts_are_equal_across_gateways_and_differ_with_the_server_secret() -> None:
    key, stored = new_key("a", "acme")
    here, there = KeyRing(SECRET, [stored]).authenticate(key), KeyRing(SECRET, [stored]).authenticate(key)
    other = KeyRing("6" * 64, [stored]).authenticate(key)
    assert here.salt == there.salt != other.salt


@pytest.mark.parametrize("presented", [None, "", "a", "a.", ".", "a.wrong", "unknown.secret", "a.b.c"])
def test_refuses_a_wrong_key_without_saying_why(presented: str | None) -> None:
    _, stored = new_key("a", "acme")
    with pytest.raises(Unauthenticated):
        KeyRing(SECRET, [stored]).authenticate(presented)


def test_a_key_id_with_an_empty_stored_secret_is_no_way_in() -> None:
    with pytest.raises(Unauthenticated):
        KeyRing(SECRET, []).authenticate("nobody.")


def test_a_key_may_be_bound_to_models() -> None:
    key, stored = new_key("a", "acme", ("small",))
    ring = KeyRing(SECRET, [stored])
    payer = ring.authenticate(key).payer
    assert allows_model(payer, "small") and not allows_model(payer, "large")


def test_what_is_written_is_read_again_and_holds_no_secret(tmp_path: Path) -> None:
    key, stored = new_key("a", "acme", ("small",))
    path = tmp_path / "keys.json"
    path.write_text(dump_keys(new_server_secret(), [stored]))
    assert key.partition(".")[2] not in path.read_text()
    assert load_keys(path).authenticate(key).tenant == "acme"


def test_a_key_may_have_a_priority(tmp_path: Path) -> None:
    (plain, stored), (urgent, other) = new_key("a", "acme"), new_key("b", "acme")
    path = tmp_path / "keys.json"
    path.write_text(dump_keys(SECRET, [stored, replace(other, priority=10)]))
    ring = load_keys(path)
    assert (ring.authenticate(plain).priority, ring.authenticate(urgent).priority) == (0, 10)


def test_a_keys_tier_is_its_tenants(tmp_path: Path) -> None:
    (plain, stored), (golden, other) = new_key("a", "acme"), new_key("b", "zeta")
    path = tmp_path / "keys.json"
    path.write_text(dump_keys(SECRET, [stored, replace(other, tier=Tier.GOLD)]))
    ring = load_keys(path)
    tiers = [ring.authenticate(key).payer.tenant.tier for key in (plain, golden)]
    assert tiers == [Tier.BRONZE, Tier.GOLD]


def test_a_key_may_have_a_role(tmp_path: Path) -> None:
    (plain, stored), (boss, other) = new_key("a", "acme"), new_key("b", "acme")
    path = tmp_path / "keys.json"
    path.write_text(dump_keys(SECRET, [stored, replace(other, role=AdminRole.PLATFORM_ADMIN)]))
    ring = load_keys(path)
    roles = [ring.authenticate(key).payer.key.role for key in (plain, boss)]
    assert roles == [AdminRole.NONE, AdminRole.PLATFORM_ADMIN]


def test_reads_toml(tmp_path: Path) -> None:
    key, stored = new_key("a", "acme")
    path = tmp_path / "keys.toml"
    path.write_text(
        f'server_secret = "{SECRET}"\n[[keys]]\nid = "a"\ntenant = "acme"\nsecret_sha256 = "{stored.secret_sha256}"\n'
    )
    assert load_keys(path).authenticate(key).key_id == "a"


ENTRY: dict[str, object] = {"id": "a", "tenant": "acme", "secret_sha256": "0" * 64}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"server_secret": SECRET, "keys": [ENTRY | {"colour": 1}]}, "colour"),
        ({"server_secret": SECRET, "extra": 1, "keys": []}, "extra"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"tenant": ""}]}, "tenant"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"secret_sha256": "zz"}]}, "secret_sha256"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"models": "small"}]}, "models"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"priority": 101}]}, "priority: must be an integer .* got 101"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"priority": True}]}, "priority"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"tier": "lead"}]}, "tier: must be one of gold, .* got 'lead'"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"tier": ["gold"]}]}, "tier"),
        ({"server_secret": SECRET, "keys": [ENTRY, ENTRY | {"id": "b", "tier": "gold"}]}, "tiers bronze and gold"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"id": "a.b"}]}, "dot"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"id": "A"}]}, r"keys\[0\].id: must be 1 to 63 of a-z.*'A'"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"tenant": "a b"}]}, r"tenant: must be 1 to 63 of a-z.*'a b'"),
        ({"server_secret": SECRET, "keys": [ENTRY | {"role": "king"}]}, "role: must be one of none, viewer.*'king'"),
        ({"server_secret": SECRET, "keys": [ENTRY, ENTRY]}, "twice"),
        ({"server_secret": SECRET, "keys": {}}, "list"),
        ({"server_secret": "short", "keys": []}, "server_secret"),
        ({"keys": []}, "server_secret"),
        ([], "table"),
    ],
)
def test_a_wrong_key_file_is_refused_by_name(tmp_path: Path, content: object, named: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=named) as caught:
        load_keys(path)
    assert SECRET not in str(caught.value)


def test_a_missing_or_broken_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_keys(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_keys(tmp_path / "broken.json")


def test_secrets_do_not_show_in_representations() -> None:
    key, stored = new_key("a", "acme")
    caller = KeyRing(SECRET, [stored]).authenticate(key)
    assert stored.secret_sha256 not in repr(stored)
    assert repr(caller.salt) not in repr(caller)
    assert isinstance(stored, ApiKey)
