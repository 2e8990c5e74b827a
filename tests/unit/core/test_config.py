from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.core.config import Section, Settings, describe, secret
from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    dtype: str = "bfloat16"
    block_size: int = 16
    ratio: float = 0.5
    enabled: bool = False
    names: tuple[str, ...] = ()
    password: str = secret()


ENGINE = Section("engine", Sample)


def fill(*flags: str, environ: dict[str, str] | None = None, file: Path | None = None) -> Sample:
    return Settings.read(file=file, environ=environ or {}, flags=flags).fill(ENGINE)


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[engine]\ndtype = "a"\nblock_size = 8\nratio = 1\nnames = ["x", "y"]\n')
    environ = {"BATON_ENGINE__DTYPE": "b", "BATON_ENGINE__BLOCK_SIZE": "4", "PATH": "/bin"}
    got = fill("engine.dtype=c", environ=environ, file=file)
    assert got == Sample(dtype="c", block_size=4, ratio=1.0, names=("x", "y"))


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("engine.colour=red", "engine.colour"),
        ("motor.dtype=x", "motor"),
        ("engine.block_size=many", "block_size must be int, got 'many'"),
        ("engine.enabled=perhaps", "enabled must be bool"),
        ("engine.dtype", "SECTION.KEY=VALUE"),
    ],
)
def test_wrong_flags_are_named(flag: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        fill(flag)


def test_unknown_key_in_environment_and_file_names_its_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment BATON_ENGINE__COLOUR"):
        fill(environ={"BATON_ENGINE__COLOUR": "red"})
    file = tmp_path / "baton.toml"
    file.write_text("[engine]\ncolour = 1\n")
    with pytest.raises(ConfigError, match=r"file .*baton.toml: unknown key engine.colour"):
        fill(file=file)
    file.write_text("[engine\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        fill(file=file)
    with pytest.raises(ConfigError, match="cannot be read"):
        fill(file=tmp_path / "absent.toml")


def test_secrets_never_show() -> None:
    got = fill("engine.password=hunter2")
    assert got.password == "hunter2"
    assert "hunter2" not in describe("engine", got) + repr(got)


def test_settings_survive_the_way_to_a_child() -> None:
    settings = Settings.read(file=None, environ={}, flags=["engine.names=a,b", "engine.enabled=true"])
    assert Settings.read(file=None, environ={}, flags=settings.as_flags()).fill(ENGINE) == settings.fill(ENGINE)


def test_a_password_inside_a_url_never_shows() -> None:
    shown = describe("engine", Sample(dtype="redis://worker:hush@127.0.0.1:6379/0"))
    assert 'dtype = "redis://worker:***@127.0.0.1:6379/0"' in shown
    assert "redis://127.0.0.1:6379/0" in describe("engine", Sample(dtype="redis://127.0.0.1:6379/0"))
