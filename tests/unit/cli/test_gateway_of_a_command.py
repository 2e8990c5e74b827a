"""Which gateway a command talks to, and with whose key."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.door import Door, find_door
from baton.cli.state_dir import StackRecord, StateDir
from baton.core.errors import ConfigError

RECORD = StackRecord(os.getpid(), "127.0.0.1:8600", "local.key", "m", "redis://", "", "baton", ready=True)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[StateDir]:
    """A stack that is ready."""
    where = StateDir(tmp_path)
    where.prepare()
    with where.owned():
        where.write(RECORD)
        yield where


def chosen(where: StateDir, address: str | None = None, key: str | None = None, ca: Path | None = None) -> Door:
    return find_door(Namespace(state_dir=where.path, address=address, key=key, ca=ca))


def test_without_options_it_is_the_local_one(local: StateDir) -> None:
    assert chosen(local) == Door("127.0.0.1:8600", "local.key")
    assert chosen(local, key="other.key") == Door("127.0.0.1:8600", "other.key")
    assert chosen(local, address="127.0.0.1:8600") == Door("127.0.0.1:8600", "local.key")
    local.write(replace(RECORD, gateway_ca="/door.pem"))
    assert chosen(local).ca == Path("/door.pem")
    assert chosen(local, ca=Path("/other.pem")).ca == Path("/other.pem")


def test_with_address_and_key_no_local_stack_is_needed(tmp_path: Path) -> None:
    assert chosen(StateDir(tmp_path), "far:8600", "far.key") == Door("far:8600", "far.key")


def test_the_local_key_is_sent_to_no_other_gateway(local: StateDir) -> None:
    with pytest.raises(ConfigError, match="far:8600 needs --key: the local key is for the local gateway"):
        chosen(local, address="far:8600")


def test_a_stack_that_still_starts_is_told_so(local: StateDir) -> None:
    local.write(replace(RECORD, gateway="", ready=False))
    with pytest.raises(ConfigError, match="is still starting"):
        chosen(local)
