"""API keys and salts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ConfigError, InvalidRequest
from baton.core.types import KeyRecord, Limits, Tenant
from gateway.credentials import ServerSecret

SECRET = ServerSecret("5" * 64)
BLANK = KeyRecord("k1", "acme", "", "", created_at=100.0, limits=Limits(concurrency=2), priority=7)
TENANT = Tenant("acme", "umbrella")


def test_a_key_is_shown_once_and_stored_without_its_secret() -> None:
    shown, stored = SECRET.issue(BLANK)
    key_id, _, secret = shown.partition(".")
    assert (key_id, stored.prefix) == ("k1", f"k1.{secret[:4]}")
    assert secret not in repr(stored) + stored.secret_hmac
    assert stored.secret_hmac not in repr(stored)
    assert SECRET.proves(stored, secret)
    assert SECRET.issue(BLANK)[0] != shown


def test_a_secret_proves_its_own_key_under_its_own_servers_secret_only() -> None:
    shown, stored = SECRET.issue(BLANK)
    secret = shown.partition(".")[2]
    assert not SECRET.proves(stored, secret + "x")
    assert not SECRET.proves(stored, "")
    assert not SECRET.proves(replace(stored, id="k2"), secret)
    assert not ServerSecret("6" * 64).proves(stored, secret)
    assert not SECRET.proves(BLANK, ""), "a record without an HMAC is no way in"


def test_rotation_leaves_both_keys_valid_for_the_overlap() -> None:
    _, old = SECRET.issue(BLANK)
    shown, new, ending = SECRET.rotate(old, "k2", overlap=60, now=1000)
    assert SECRET.proves(new, shown.partition(".")[2])
    assert (new.limits, new.priority, new.tenant, new.created_at) == (old.limits, 7, "acme", 1000)
    assert [key.is_active(1059) for key in (ending, new)] == [True, True]
    assert [key.is_active(1060) for key in (ending, new)] == [False, True]


def test_rotation_never_lengthens_a_keys_life() -> None:
    _, old = SECRET.issue(replace(BLANK, expires_at=1010.0))
    assert SECRET.rotate(old, "k2", overlap=60, now=1000)[2].expires_at == 1010.0


@pytest.mark.parametrize(
    ("successor", "overlap", "now", "named"),
    [
        ("k1", 60.0, 1000.0, "successor"),
        ("k.2", 60.0, 1000.0, "key.id"),
        ("k2", 0.0, 1000.0, "overlap"),
        ("k2", 1e9, 1000.0, "overlap"),
        ("k2", 60.0, 3000.0, "no longer active"),
    ],
)
def test_a_rotation_that_makes_no_sense_is_refused(successor: str, overlap: float, now: float, named: str) -> None:
    _, old = SECRET.issue(replace(BLANK, expires_at=2000.0))
    with pytest.raises(InvalidRequest, match=named):
        SECRET.rotate(old, successor, overlap=overlap, now=now)


def test_salts_keep_tenants_apart_unless_they_share_a_group_of_one_organisation() -> None:
    salts = [
        SECRET.salt(tenant)
        for tenant in (
            TENANT,
            Tenant("zeta", "umbrella"),
            Tenant("acme", "umbrella", sharing_group="g"),
            Tenant("zeta", "umbrella", sharing_group="g"),
            Tenant("zeta", "other", sharing_group="g"),
            Tenant("g", "umbrella"),
            Tenant("acme", "other"),
            replace(TENANT, uid="another of the same name"),
        )
    ]
    assert salts[2] == salts[3]
    assert len(set(salts)) == 7
    assert {len(salt) for salt in salts} == {16}
    assert ServerSecret("6" * 64).salt(TENANT) != salts[0]


def test_a_short_server_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="at least 32 digits, got 5") as caught:
        ServerSecret("hush!")
    assert "hush!" not in str(caught.value)
