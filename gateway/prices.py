"""The price book: what the tokens of each model cost, from one TOML file.

::

    kilowatt_hour = "0.25"               # optional: for energy, where workers measure it (GPUs, by NVML)

    [models."smollm2-135m-instruct"]     # the name "*" is for every model that is not listed
    input = "0.15"                       # a million tokens, in the book's currency, as text: it is exact
    cached = "0.0375"                    # optional, of prompt tokens found in a prefix cache; without it, as input
    output = "0.60"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import cast

from baton.core.errors import ConfigError
from baton.core.types import FREE, Prices

UNITS = 10**12  # of ``Prices`` to one of the currency
MILLION = 10**6
JOULES = 3_600_000  # in a kilowatt hour
MAX_PRICE = 1000  # a million tokens, or a kilowatt hour; keeps a request's cost exact in a script's 53 bits
EVERY_OTHER_MODEL = "*"


class PriceBook:
    """Prices by model; a model that it does not know is free."""

    def __init__(self, models: Mapping[str, Prices] = MappingProxyType({})) -> None:
        self._models = dict(models)

    def of(self, model: str) -> Prices:
        return self._models.get(model) or self._models.get(EVERY_OTHER_MODEL, FREE)


def load_prices(path: Path) -> PriceBook:
    """Read a price file. Raises ConfigError naming the entry, the limit and the value."""
    try:
        return parse_prices(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"price file {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"price file {path}: cannot be parsed: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"price file {path}: {error.message}") from error


def parse_prices(text: str) -> PriceBook:
    document = _table(tomllib.loads(text), "the file", {"kilowatt_hour", "models"})
    joule = round(_price(document, "kilowatt_hour", "0") * UNITS / JOULES)
    models = document.get("models", {})
    if not isinstance(models, dict):
        raise ConfigError(f"models: must be tables, got {models!r:.100}")
    entries = cast("dict[str, object]", models)
    return PriceBook({name: _prices(entry, f"models.{name}", joule) for name, entry in entries.items()})


def _prices(entry: object, where: str, joule: int) -> Prices:
    table = _table(entry, where, {"input", "cached", "output"})
    prompt = _price(table, "input", None, where)
    cached = _price(table, "cached", str(prompt), where)
    output = _price(table, "output", None, where)
    return Prices(*(_units_a_token(price, where) for price in (prompt, cached, output)), joule=joule)


def _units_a_token(price: Decimal, where: str) -> int:
    units = price * UNITS / MILLION
    if units != int(units):
        raise ConfigError(f"{where}: must have at most 6 digits after the point, got {price}")
    return int(units)


def _price(table: Mapping[str, object], name: str, default: str | None, where: str = "") -> Decimal:
    field = f"{where}.{name}" if where else name
    value = table.get(name, default)
    try:
        price = Decimal(value) if isinstance(value, str) else None
    except InvalidOperation:
        price = None
    if price is None or not price.is_finite():
        raise ConfigError(f'{field}: must be a number as text, like "0.15", got {value!r:.100}')
    if not 0 <= price <= MAX_PRICE:
        raise ConfigError(f"{field}: must be from 0 to {MAX_PRICE}, got {price}")
    return price


def _table(value: object, where: str, known: set[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a table, got {value!r:.100}")
    table = cast("dict[str, object]", value)
    if unknown := sorted(set(table) - known):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return table
