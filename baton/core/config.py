"""Configuration: frozen dataclasses filled once, in layers: defaults < TOML file < environment < ``--set`` flags.

A key is addressed as ``section.key``: ``[engine] dtype = "float32"`` in TOML, ``BATON_ENGINE__DTYPE=float32`` in the
environment, ``--set engine.dtype=float32`` as a flag. An unknown section or key, or a value of the wrong type, is a
``ConfigError`` that names it and the layer it came from.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

from baton.core.errors import ConfigError

SECTIONS = ("gateway", "planner", "prefill", "decode", "kvtransfer", "engine", "state")
ENVIRONMENT_PREFIX = "BATON_"

_URL_PASSWORD = re.compile(r"(\w+://[^/@:]*:)[^@]+@")

T = TypeVar("T")


def secret(default: str = "") -> str:
    """A field whose value never shows in ``describe`` or logs."""
    return dataclasses.field(default=default, repr=False, metadata={"secret": True})


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as one layer gave it."""

    section: str
    key: str
    value: object
    origin: str


def _no_defaults(given: Mapping[str, object]) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True)
class Section(Generic[T]):
    """A dataclass under the name that its keys are addressed by.

    ``defaults`` gives, for the values that are set, those defaults that depend on them; they win over the dataclass's.
    """

    name: str
    type: type[T]
    defaults: Callable[[Mapping[str, object]], Mapping[str, object]] = _no_defaults


def file_settings(path: Path) -> list[Setting]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}") from error
    found: list[Setting] = []
    for section, table in document.items():
        if not isinstance(table, dict):
            raise ConfigError(f"config file {path}: {section} must be a table [{section}], got {table!r}")
        entries = cast(dict[str, object], table)
        found += [Setting(section, key, value, f"file {path}") for key, value in entries.items()]
    return found


def environment_settings(environ: Mapping[str, str]) -> list[Setting]:
    """Variables of the form BATON_SECTION__KEY; other BATON_ variables are not configuration."""
    found: list[Setting] = []
    for name, value in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            section, _, key = name[len(ENVIRONMENT_PREFIX) :].lower().partition("__")
            found.append(Setting(section, key, value, f"environment {name}"))
    return found


def flag_settings(flags: Iterable[str]) -> list[Setting]:
    """``SECTION.KEY=VALUE`` each."""
    found: list[Setting] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(f"--set takes SECTION.KEY=VALUE, got {flag!r}")
        found.append(Setting(section, key, value, f"--set {name.strip()}"))
    return found


class Settings:
    """All layers together, ready to fill sections. Later layers win."""

    def __init__(self, layers: Iterable[Setting]) -> None:
        self._settings = list(layers)
        for setting in self._settings:
            if setting.section not in SECTIONS:
                raise ConfigError(
                    f"{setting.origin}: unknown section {setting.section!r}; known are {', '.join(SECTIONS)}"
                )

    @classmethod
    def read(cls, *, file: Path | None, environ: Mapping[str, str], flags: Iterable[str]) -> Settings:
        layers = file_settings(file) if file is not None else []
        return cls([*layers, *environment_settings(environ), *flag_settings(flags)])

    def last(self, section: str, key: str) -> Setting | None:
        """The one that counts; None where no layer sets the key."""
        return next((s for s in reversed(self._settings) if (s.section, s.key) == (section, key)), None)

    def fill(self, section: Section[T]) -> T:
        """The section's dataclass with every layer applied."""
        return _fill(section, [s for s in self._settings if s.section == section.name])

    def as_flags(self) -> list[str]:
        """The same settings as ``--set`` values, to hand to a child process."""
        return [f"{s.section}.{s.key}={_as_text(s.value)}" for s in self._settings]


def _fill(section: Section[T], settings: Iterable[Setting]) -> T:
    hints = get_type_hints(section.type)
    known = {f.name: f for f in dataclasses.fields(section.type)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for setting in settings:
        if setting.key not in known:
            raise ConfigError(
                f"{setting.origin}: unknown key {section.name}.{setting.key}; known are {', '.join(sorted(known))}"
            )
        values[setting.key] = _parse(hints[setting.key], setting)
    return section.type(**{**section.defaults(values), **values})


def _parse(kind: Any, setting: Setting) -> object:
    value = setting.value
    try:
        if kind is bool:
            return _parse_bool(value)
        if kind is int and not isinstance(value, bool):
            return int(value) if isinstance(value, (int, str)) else _wrong(value)
        if kind is float and not isinstance(value, bool):
            return float(value)  # type: ignore[arg-type]
        if kind is str and isinstance(value, str):
            return value
        if kind is Path and isinstance(value, str):
            return Path(value)
        if kind == tuple[str, ...]:
            return _parse_strings(value)
    except (TypeError, ValueError):
        pass
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    raise ConfigError(f"{setting.origin}: {setting.section}.{setting.key} must be {name}, got {value!r}")


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "false": False, "0": False}
    return known[value.lower()] if isinstance(value, str) and value.lower() in known else _wrong(value)


def _parse_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    parts: list[object] = cast(list[object], value) if isinstance(value, list) else [None]
    texts = tuple(part for part in parts if isinstance(part, str))
    return texts if len(texts) == len(parts) else _wrong(parts)


def _wrong(value: object) -> Any:
    raise ValueError(value)


def _as_text(value: object) -> str:
    return ",".join(map(str, cast(list[object], value))) if isinstance(value, list) else str(value)


def mask_password(url: str) -> str:
    """``url`` with *** for the password in it; any other text as it is."""
    return _URL_PASSWORD.sub(r"\1***@", url)


def describe(name: str, section: object) -> str:
    """The section as TOML with its final values; secrets and passwords inside URLs are masked."""
    lines = [f"[{name}]"]
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if field.metadata.get("secret"):
            value = "***" if value else ""
        elif isinstance(value, str):
            value = mask_password(value)
        lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in cast(tuple[object, ...], value)) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
