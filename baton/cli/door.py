"""Which gateway a command talks to: the one that its options name, or the local stack's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from baton.cli import state_dir
from baton.cli.state_dir import StackRecord, StateDir
from baton.cli.subcommands import directory, named, text
from baton.client import Client
from baton.core.address import check_address
from baton.core.errors import ConfigError
from baton.rpc.channels import ClientTls


@dataclass(frozen=True, slots=True)
class Door:
    """A gateway and how to be let in. ``ca``: a PEM file that its certificate is checked with; None: no TLS."""

    address: str
    key: str
    ca: Path | None = None

    def client(self) -> Client:
        return Client(self.address, self.key, ClientTls(self.ca) if self.ca else None)


def add_options(parser: argparse.ArgumentParser, *address: str) -> None:
    """``address``: the spellings of the option that names the gateway."""
    add_door(parser, *address)
    parser.add_argument("--model", type=text, default="", help="the only one that is served without it")


def add_door(parser: argparse.ArgumentParser, *address: str) -> None:
    """Which gateway, and with which key."""
    parser.add_argument("--state-dir", type=directory, default=state_dir.DEFAULT, help="of the local stack")
    parser.add_argument("--key", type=named, help="API key; the local one without it")
    parser.add_argument(*address, dest="address", type=named, help="gateway address; the local one without it")
    parser.add_argument("--ca", type=Path, help="PEM file that the gateway's certificate is checked with: TLS")


def door_of(record: StackRecord) -> Door:
    """The local stack's."""
    return Door(record.gateway, record.key, Path(record.gateway_ca) if record.gateway_ca else None)


def find_door(arguments: argparse.Namespace) -> Door:
    """Address, key and certificate are the given ones, else those of the local stack. ConfigError without either, and
    for another gateway without a key: the local one, which may do everything here, goes to nobody else."""
    address, key, ca = arguments.address, arguments.key, arguments.ca
    if address:
        check_address("address", address)
    if address and key:
        return Door(address, key, ca)
    record = StateDir(arguments.state_dir).read()
    if not record.ready:
        raise ConfigError(f"the stack under {arguments.state_dir} is still starting: `baton status` shows how far")
    local = door_of(record)
    if address and address != local.address:
        raise ConfigError(f"{address} needs --key: the local key is for the local gateway, {local.address}")
    return Door(local.address, key or local.key, ca or local.ca)
