"""Names, times, limits and tables of the admin commands, and the tenant that ``baton up`` makes."""

from __future__ import annotations

import argparse
import asyncio
import json
from datetime import UTC, datetime

import pytest

from baton.cli.admin import limit, moment, name_of, names, show
from baton.cli.local_tenant import make_local_tenant
from baton.cli.main import build_parser
from baton.cli.quota_commands import _difference, _harmless, _money, _with_rule
from baton.core.clock import SystemClock
from baton.core.errors import InvalidRequest
from baton.core.types import Commit, Limits, ModelLimits, RecordChange, RecordKind, ResourceName, Tenant
from baton.state.audited_records import MemoryRecords


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("o", ResourceName("o")),
        ("o/t", ResourceName("o", "t")),
        ("o/t/k", ResourceName("o", "t", "k")),
        ("organizations/o/tenants/t", ResourceName("o", "t")),
    ],
)
def test_short_names_stand_for_resource_names(text: str, name: ResourceName) -> None:
    assert name_of("name", text) == name
    assert name_of("name", str(name)) == name


@pytest.mark.parametrize(
    "text", ["", "a/b/c/d", "o/", "/t", "o//k", "O", "a{b}", "a\nb", "organizations/o/keys/k", "a b"]
)
def test_what_is_no_name_is_refused_with_the_pattern(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be (1 to 63 of a-z|organizations/O)"):
        name_of("name", text, *RecordKind)


def test_a_name_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be organizations/O/tenants/T, got"):
        name_of("name", "o", RecordKind.TENANT)


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert moment("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC).timestamp()
    assert moment("2026-01-31T12:00+01:00") == datetime(2026, 1, 31, 11, tzinfo=UTC).timestamp()
    with pytest.raises(argparse.ArgumentTypeError, match="got 'soon'"):
        moment("soon")


def test_none_lifts_a_limit_or_a_list() -> None:
    assert limit("none") is None and limit("0") == 0 and names("none") is None and names("a,b") == ("a", "b")
    with pytest.raises(argparse.ArgumentTypeError, match="whole number or none, got 'many'"):
        limit("many")


def test_a_models_limits_change_one_by_one_and_go_with_the_last() -> None:
    rules = _with_rule((), "m", {"concurrency": 1})
    rules = _with_rule(rules, "n", {"concurrency": 2})
    rules = _with_rule(rules, "m", {"tokens_per_day": 5})
    assert rules == (ModelLimits("m", Limits(concurrency=1, tokens_per_day=5)), ModelLimits("n", Limits(concurrency=2)))
    assert _with_rule(rules, "m", {"concurrency": None, "tokens_per_day": None}) == rules[1:]


def test_costs_are_exact() -> None:
    assert [_money(units) for units in (0, 1, 10**12, 1_234_500_000_000)] == ["0", "0.000000000001", "1", "1.2345"]


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@x", "\tx"])
def test_a_spreadsheet_takes_no_cell_for_a_formula(cell: str) -> None:
    assert _harmless(cell) == f"'{cell}"
    assert (_harmless("req-1"), _harmless(-1)) == ("req-1", -1)


def test_a_change_is_told_by_the_fields_that_it_touched() -> None:
    before = {"tier": "gold", "limits": {"concurrency": 1, "burst": None}, "model_limits": []}
    after = before | {"limits": {"concurrency": 2, "burst": None}}
    assert _difference(before, after) == {"change": "limits.concurrency: 1 -> 2"}
    rule = before | {"model_limits": [{"model": "m", "limits": {"burst": 3}}]}
    assert _difference(before, rule) == {"change": "model_limits.m.burst: None -> 3"}
    assert (_difference({}, after), _difference(before, {})) == ({"change": "made"}, {"change": "deleted"})


def test_tables_leave_out_what_nobody_set(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "limits": {"burst": 1}, "models": None}, {"name": "b", "limits": {}, "models": None}]
    show(argparse.Namespace(output="table"), rows)
    assert capsys.readouterr().out.split() == ["name", "limits", "----", "-------", "a", "burst=1", "b"]
    show(argparse.Namespace(output="json"), rows)
    assert json.loads(capsys.readouterr().out) == rows
    show(argparse.Namespace(output="table"), [])
    assert capsys.readouterr().out == "none\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tenant create o/t --tier lead", "--tier: must be one of gold, silver, bronze, got 'lead'"),
        ("tenant create o/t --away never", "--away: must be one of bounded_local, closed, open, got 'never'"),
        ("key create o/t --role king", "--role: must be one of none, viewer, tenant_admin, platform_admin, got 'king'"),
        ("quota set o/t --concurrency many", "--concurrency: must be a whole number or none, got 'many'"),
        ("quota set o/t --shadow speed", "--shadow: must be one of requests_per_minute"),
        ("usage show --by colour", "--by: must be one of tenant, key, model, got 'colour'"),
        ("usage export --to soon", "--to: must be like 2026-01-31"),
        ("audit list --limit 0", "--limit: must be an integer from 1 to"),
        ("tenant", "the following arguments are required: ACTION"),
        ("quota explain", "the following arguments are required: REQUEST_ID"),
    ],
)
def test_what_the_admin_commands_refuse(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(words.split())
    assert said in capsys.readouterr().err


def test_the_local_tenant_is_made_once_and_kept_as_it_is() -> None:
    async def body() -> None:
        records = MemoryRecords(SystemClock())
        await make_local_tenant(records)
        found = await records.tenant("local")
        assert found is not None and found[0] == Tenant("local", "local")
        changed = Tenant("local", "local", limits=Limits(concurrency=2))
        change = RecordChange(ResourceName("local", "local"), found[1], found[0], changed)
        await records.commit(Commit("test", "update tenant", (change,)))
        await make_local_tenant(records)
        found = await records.tenant("local")
        assert found is not None and found[0] == changed

    asyncio.run(body())


def test_each_warning_of_a_record_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "a", "models": ("x", "y"), "pool": "", "warnings": ["first, of two", "second"]}
    assert show(argparse.Namespace(output="table"), [row], one=True) == 0
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["name", "a"],
        ["models", "x,y"],
        ["warnings", "first, of two"],
        ["warnings", "second"],
    ]
