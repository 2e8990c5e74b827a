from __future__ import annotations

import sys

import pytest

from baton.cli.terminal import Progress, printable, table


class Screen:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    steering = "a\x1b[2Jb\x9b\r\x07\tc\n\u00e9"
    assert printable(steering) == steering  # to a file or a pipe it goes as it is
    monkeypatch.setattr(sys, "stdout", Screen())
    assert printable(steering) == "a\ufffd[2Jb\ufffd\ufffd\ufffd\tc\n\u00e9"


def test_progress_is_redrawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress("load")
    for done in (0, 1, 1, 2):
        progress(done, 2)
    assert screen.text == "\rload:   0 %\rload:  50 %\rload: 100 %\n"


def test_progress_is_a_few_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("load")
    for done in range(101):
        progress(done, 100)
    assert capsys.readouterr().err.splitlines() == [f"load: {percent:3d} %" for percent in range(0, 101, 20)]


def test_progress_of_nothing_is_done_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Progress("load")(0, 0)
    assert capsys.readouterr().err == "load: 100 %\n"


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_right() -> None:
    assert table(("name", "n"), [("a", "5"), ("longer", "1234")]).splitlines() == [
        "name       n",
        "------  ----",
        "a          5",
        "longer  1234",
    ]


def test_a_column_stands_right_only_if_nothing_else_is_in_it() -> None:
    rows = [("limit", "4096", ""), ("etag", "91ee10b8", "1,475"), ("address", "127.0.0.1:86", "0/4+1")]
    assert table(("field", "value", "of"), rows).splitlines() == [
        "field    value            of",
        "-------  ------------  -----",
        "limit    4096",
        "etag     91ee10b8      1,475",
        "address  127.0.0.1:86  0/4+1",
    ]
