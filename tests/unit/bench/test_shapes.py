from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from bench.shapes import NAMED, Batch, DecodeStep, FirstToken, Range, Repeat, parse_shapes


def test_a_name_stands_for_its_spellings() -> None:
    assert parse_shapes("mixed256") == [
        Batch("batch:256x100-1024/100-1024", 256, Range(100, 1024), Range(100, 1024)),
    ]
    assert [shape.name for shape in parse_shapes("ttft, prefill")] == ["ttft:2048", *NAMED["prefill"]]


def test_every_kind_can_be_spelled() -> None:
    assert parse_shapes("batch:2x3/4-5,prefill:6x7,decode:8x9/10,ttft:11,repeat:12x13/14") == [
        Batch("batch:2x3/4-5", 2, Range(3, 3), Range(4, 5)),
        Batch("prefill:6x7", 6, Range(7, 7), Range(1, 1)),
        DecodeStep("decode:8x9/10", 8, 9, 10),
        FirstToken("ttft:11", 11),
        Repeat("repeat:12x13/14", 12, 13, 14),
    ]


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (
            "mixed",
            "must be mixed256, long1000, prefill, decode, ttft, speculation, or one of batch:NxIN/OUT, .* got 'mixed'",
        ),
        ("", "got ''"),
        ("decode:4x16", "got 'decode:4x16'"),
        ("batch:2x9-3/4", "batch:2x9-3/4: a range must ascend, got 9-3"),
        ("ttft:0", "ttft:0: lengths must be from 1 to 1048576, got 0"),
        ("prefill:200000x1", "at most 100000 requests, got 200000"),
    ],
)
def test_what_is_no_shape_is_named(listed: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_shapes(listed)
