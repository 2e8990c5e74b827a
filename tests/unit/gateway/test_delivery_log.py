"""The file in which a gateway has what its streams were delivered."""

from __future__ import annotations

import errno
import logging
import os
import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.core.types import Delivered, Progress
from baton.telemetry.metrics import PrometheusMeter
from gateway.delivery_log import PIECE
from gateway.delivery_slots import (
    CLAIMED,
    DELIVERED,
    PAGE,
    SLOT,
    TEXT,
    WORD_BYTES,
    SlotIdentity,
    Slots,
    header_page,
    namespace_of,
    read_slots,
)
from tests.unit.gateway.delivery_logs import SOME, files, left_behind, opened, order


def contents(path: Path) -> Slots:
    return read_slots(path.read_bytes()[PAGE:])


def test_what_was_noted_is_in_the_file_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        slot = log.slot(order("r1"))
        assert slot is not None
        [path] = files(tmp_path)
        for delivered in (Delivered(10, 2, 1), SOME):
            slot.note(delivered)
            [logged] = contents(path).deliveries
            assert (logged.organisation, logged.progress) == (
                "umbrella",
                Progress("r1", "acme", "gateway-1", delivered),
            )
        assert namespace_of(path.read_bytes()[:PAGE]) == "baton"
        assert path.stat().st_mode & 0o777 == 0o600
        slot.free()
        assert contents(path) == Slots([], 0)
    assert files(tmp_path) == []


def test_a_longest_request_has_room(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        request_id = "\N{GRINNING FACE}" * 128
        assert log.slot(order(request_id, owner="f" * 16 + "-18446744073709551615")) is not None
        [logged] = contents(files(tmp_path)[0]).deliveries
        assert logged.progress.request_id == request_id


def test_slots_are_used_again_and_know_nothing_of_whom_they_had_before(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        for number in range(3 * PIECE // SLOT):
            slot = log.slot(order(f"r{number}"))
            assert slot is not None
            [logged] = contents(files(tmp_path)[0]).deliveries
            assert (logged.progress.request_id, logged.progress.delivered) == (f"r{number}", Delivered())
            slot.note(SOME)
            slot.free()
        assert (log.taken, files(tmp_path)[0].stat().st_size) == (0, PAGE + PIECE)


def test_a_file_grows_with_its_streams_and_moves_none_of_them(tmp_path: Path) -> None:
    count = 2 * PIECE // SLOT + 5
    with opened(tmp_path) as log:
        slots = [log.slot(order(f"r{number}")) for number in range(count)]
        for number, slot in enumerate(slots):
            assert slot is not None
            slot.note(Delivered(10, 0, number % 21))
        found = {each.progress.request_id: each.progress.delivered for each in contents(files(tmp_path)[0]).deliveries}
        assert found == {f"r{number}": Delivered(10, 0, number % 21) for number in range(count)}


def test_a_process_that_dies_while_it_takes_a_slot_leaves_no_half_of_it(tmp_path: Path) -> None:
    """Looked at before each line that writes into the slot, in which another, longer one was before."""
    seen: list[Slots] = []

    def look(frame: FrameType, event: str, _: object) -> Any:
        if event == "call" and frame.f_code.co_name not in ("write", "free"):
            return None
        if event == "line":
            sys.settrace(None)
            seen.append(contents(path))
            sys.settrace(look)
        return look

    with opened(tmp_path) as log:
        [path] = files(tmp_path)
        before = log.slot(order("r" * 100))
        assert before is not None
        before.note(SOME)
        sys.settrace(look)
        try:
            before.free()
            log.slot(order("r2", owner="gateway-2"))
        finally:
            sys.settrace(None)
        seen.append(contents(path))
    there = [[(each.progress.request_id, each.progress.delivered) for each in slots.deliveries] for slots in seen]
    assert len(seen) > 8
    assert not any(slots.damaged for slots in seen)
    assert [each for each, _ in groupby(there)] == [[("r" * 100, SOME)], [], [("r2", Delivered())]]


@pytest.mark.parametrize("at", [0, CLAIMED * WORD_BYTES, CLAIMED * WORD_BYTES + 8, 7 * WORD_BYTES, TEXT, TEXT + 20])
def test_a_slot_that_was_changed_counts_for_nothing(at: int) -> None:
    data = bytearray(slot_bytes())
    data[at] ^= 2
    assert read_slots(bytes(data)) == Slots([], 1)


@pytest.mark.parametrize(("word", "count"), [(0, 11), (1, 11), (2, 21), (2, 2**64 - 1), (3, 2**60)])
def test_no_count_is_above_what_was_claimed(word: int, count: int) -> None:
    data, at = bytearray(slot_bytes()), (DELIVERED + word) * WORD_BYTES
    data[at : at + WORD_BYTES] = count.to_bytes(WORD_BYTES, "little")
    assert read_slots(bytes(data)) == Slots([], 1)


@pytest.mark.parametrize("text", [b"\xff\nacme\nr1\ng1", b"one line", b"{x}\nacme\nr1\ng1"])
def test_a_slot_that_somebody_else_sealed_counts_for_nothing(text: bytes) -> None:
    identity = SlotIdentity.sealed((10, 20), text)
    assert read_slots(slot_bytes(identity)) == Slots([], 1)


def test_a_cut_slot_is_damaged_and_those_before_it_are_not() -> None:
    whole = slot_bytes()
    found = read_slots(whole + whole[:100])
    assert (len(found.deliveries), found.damaged) == (1, 1)
    assert read_slots(whole + bytes(100)).damaged == 0


@pytest.mark.parametrize("page", [b"", b"hello", b"x" * PAGE, header_page("baton")[:-1], b"BATONDL2" + bytes(PAGE)])
def test_what_is_no_header_has_no_namespace(page: bytes) -> None:
    assert namespace_of(page) is None


def test_a_directory_that_cannot_be_used_ends_the_start_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"delivery log directory {tmp_path}/file/below: cannot be written to"):
        opened(tmp_path / "file" / "below").__enter__()


def test_a_full_disk_ends_the_start_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.delivery_log.os.pwrite", full_disk)
    with pytest.raises(ConfigError, match=f"{tmp_path}: cannot be written to: No space left"):
        opened(tmp_path).__enter__()
    assert files(tmp_path) == []


def test_a_disk_that_fills_up_costs_new_streams_their_slots_and_nobody_else_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meter = PrometheusMeter()
    with opened(tmp_path, meter=meter) as log:
        slots = [log.slot(order(f"r{number}")) for number in range(PIECE // SLOT)]
        with monkeypatch.context() as patch:
            patch.setattr("gateway.delivery_log.os.pwrite", full_disk)
            assert [log.slot(order("late")) for _ in range(3)] == [None] * 3
        slots[0].note(SOME)  # type: ignore[union-attr]
        assert log.slot(order("later")) is not None
        assert len(contents(files(tmp_path)[0]).deliveries) == PIECE // SLOT + 1
    assert "baton_quota_unlogged_requests_total 3.0" in meter.exposition().decode()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines[0] == "delivery log cannot grow: new streams are not logged"
    assert lines[1:] == ["delivery log left behind: Redis was not told of all"]


def test_what_nobody_was_told_of_stays_in_the_file(tmp_path: Path) -> None:
    path = left_behind(tmp_path, (order("r1"), SOME))
    assert [each.progress.delivered for each in contents(path).deliveries] == [SOME]


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def slot_bytes(identity: SlotIdentity | None = None) -> bytes:
    if identity is None:
        identity = SlotIdentity.of("umbrella", Progress("r1", "acme", "gateway-1", SOME), (10, 20))
    assert identity is not None
    words = (identity.seal, 10, 2, 7, 300, *identity.claimed, len(identity.text))
    return (b"".join(word.to_bytes(WORD_BYTES, "little") for word in words) + identity.text).ljust(SLOT, b"\0")
