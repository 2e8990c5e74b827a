from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.children import reason_of_end
from baton.cli.logs import follow, lines, log_files
from baton.core.errors import InvalidRequest


def written(tmp_path: Path, **logs: str) -> Path:
    for name, text in logs.items():
        (tmp_path / f"{name.replace('_', '-')}.log").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_role_or_an_id_chooses_the_logs(tmp_path: Path) -> None:
    written(tmp_path, decode_0="a\nb\n", decode_1="c\n", gateway_0="d\n")
    assert list(lines(log_files(tmp_path, "decode"))) == ["decode-0: a", "decode-0: b", "decode-1: c"]
    assert list(lines(log_files(tmp_path, "gateway-0"))) == ["d"]
    assert len(log_files(tmp_path, None)) == 3
    with pytest.raises(InvalidRequest, match="no log of 'deco'; there are: decode-0, decode-1, gateway-0"):
        log_files(tmp_path, "deco")


def test_lines_of_several_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    def line(second: int, message: str) -> str:
        return f'{{"time": "2026-01-31T12:00:0{second}.000Z", "message": "{message}"}}\n'

    written(tmp_path, a_0=line(1, "one") + line(4, "four"), b_0=line(2, "two") + "Traceback\n" + line(3, "three"))
    written(tmp_path, redis_0="without any\n")
    shown = list(lines(log_files(tmp_path, None)))
    assert [line.rpartition(": ")[2].strip('"}') for line in shown] == [
        "without any",
        "one",
        "two",
        "Traceback",
        "three",
        "four",
    ]


def test_following_starts_with_the_last_lines_and_waits_for_whole_ones(tmp_path: Path) -> None:
    log = written(tmp_path, decode_0="x" * 9000 + "\nold\n") / "decode-0.log"
    followed = follow([log])
    assert next(followed) == "old"
    with log.open("a", encoding="utf-8") as out:
        out.write("new\nhalf")
        out.flush()
        assert next(followed) == "new"
        out.write(" whole\n")
    assert next(followed) == "half whole"
    followed.close()


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ('{"level": "error", "message": "engine.x: must"}\n{"level": "info", "message": "ended"}\n', "engine.x: must"),
        ('{"level": "error", "message": "bug", "exception": "Traceback\\nKeyError: 1"}\n', "bug: KeyError: 1"),
        ("python -m services.decode: --set x: unknown key\n\n", "python -m services.decode: --set x: unknown key"),
        ('{"level": "info", "message": "loading"}\n', "loading"),
        ("Traceback\nSegmentation fault\n", "Segmentation fault"),
        ("[1]\n", "[1]"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_an_end_is_the_message_of_the_last_error(tmp_path: Path, log: str, reason: str) -> None:
    assert reason_of_end(written(tmp_path, decode_0=log) / "decode-0.log") == reason
