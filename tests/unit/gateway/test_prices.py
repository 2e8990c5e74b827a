from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.core.types import FREE, Delivered, Prices
from gateway.prices import PriceBook, load_prices, parse_prices

BOOK = """
kilowatt_hour = "0.36"
[models.small]
input = "0.15"
cached = "0.0375"
output = "0.60"
[models."*"]
input = "1"
output = "2.5"
"""


def test_prices_are_exact_to_the_token() -> None:
    book = parse_prices(BOOK)
    assert book.of("small") == Prices(150_000, 37_500, 600_000, joule=100_000)
    assert book.of("any other") == Prices(1_000_000, 1_000_000, 2_500_000, joule=100_000)


def test_a_request_costs_its_computed_cached_and_output_tokens_and_its_energy() -> None:
    cost = Delivered(1_000_000, 400_000, 500_000, energy_millijoules=3_600_000_000).cost(parse_prices(BOOK).of("small"))
    assert cost == round((0.6 * 0.15 + 0.4 * 0.0375 + 0.5 * 0.60 + 0.36) * 10**12)


def test_without_a_price_nothing_costs() -> None:
    assert PriceBook().of("m") == FREE
    assert parse_prices('[models.small]\ninput = "1"\noutput = "1"').of("m") == FREE


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour = 1", "colour"),
        ("models = 1", "models"),
        ("[models]\nsmall = 1", "models.small"),
        ('[models.small]\ninput = "1"', "models.small.output"),
        ('[models.small]\ninput = 0.15\noutput = "1"', "models.small.input.*as text"),
        ('[models.small]\ninput = "x"\noutput = "1"', "models.small.input"),
        ('[models.small]\ninput = "nan"\noutput = "1"', "models.small.input"),
        ('[models.small]\ninput = "-1"\noutput = "1"', "models.small.input.*from 0 to 1000, got -1"),
        ('[models.small]\ninput = "1001"\noutput = "1"', "from 0 to 1000, got 1001"),
        ('[models.small]\ninput = "0.0000001"\noutput = "1"', "6 digits"),
        ('[models.small]\ninput = "1"\noutput = "1"\ncolour = 1', "models.small: unknown key 'colour'"),
        ("[models", "cannot be parsed"),
    ],
)
def test_a_wrong_price_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"prices\.toml.*{named}"):
        load_prices(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prices(tmp_path / "none.toml")
