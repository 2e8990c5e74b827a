"""Two workers exchange blocks only if everything that decides the bytes is equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ConfigError, TransferRejected
from baton.core.types import KvFormat, KvHandshake
from baton.engine.fake import fake_card
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.handshake import LATE_CHECKSUMS, OFFER_STREAMS, RESLICE, compare, identity, late_ways

MINE = KvHandshake("a", 1, "m", "hash", KvFormat("fake", 16, 1, 1, 8))


def test_equal_formats_of_different_workers_fit() -> None:
    compare(MINE, replace(MINE, worker_id="b", epoch=2, features=("compression",)))
    compare(MINE, replace(MINE, protocol_version=2))  # a newer peer has to fit us, not we it


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "bfloat16"), ("layers", 2), ("kv_heads", 3), ("head_dim", 4), ("layout", "other/1")],
)
def test_different_format_is_refused_by_the_fields_name(field: str, value: object) -> None:
    theirs = replace(MINE, worker_id="b", format=replace(MINE.format, **{field: value}))
    with pytest.raises(TransferRejected, match=rf"format\.{field}: a has .* b has {value!r}"):
        compare(MINE, theirs)


@pytest.mark.parametrize("change", [{"block_size": 32}, {"shards": 2}, {"block_size": 1, "shards": 4}])
def test_blocks_of_other_sizes_and_shards_fit_where_both_convert_them(change: dict[str, int]) -> None:
    mine = replace(MINE, format=replace(MINE.format, kv_heads=4), features=(RESLICE,), transports=("cuda-ipc", "shm"))
    theirs = replace(mine, worker_id="b", format=replace(mine.format, **change))
    field, value = next(iter(change.items()))
    differs = rf"format\.{field}: a has .*, b has {value}"
    compare(mine, theirs)
    compare(theirs, mine)
    with pytest.raises(TransferRejected, match=f"{differs}, and b does not convert"):
        compare(mine, replace(theirs, features=()))
    with pytest.raises(TransferRejected, match=f"{differs}, which only shm, tcp convert; in common are cuda-ipc"):
        compare(mine, replace(theirs, transports=("cuda-ipc", "tcp")))
    with pytest.raises(TransferRejected, match=f"{differs}, which only shm, tcp convert; in common are none"):
        compare(mine, replace(theirs, transports=()))


@pytest.mark.parametrize("shards", [0, 3, 8])
def test_shards_that_do_not_share_the_heads_equally_are_refused(shards: int) -> None:
    mine = replace(MINE, format=replace(MINE.format, kv_heads=4), features=(RESLICE,))
    theirs = replace(mine, worker_id="b", format=replace(mine.format, shards=shards))
    with pytest.raises(TransferRejected, match=f"must divide 4 heads, got {shards}"):
        compare(mine, theirs)


def test_a_worker_says_that_it_converts() -> None:
    assert RESLICE in identity("a", 1, fake_card()).features


def test_checksums_come_later_by_the_ways_that_the_receivers_version_knows() -> None:
    by_others = {"cuda-ipc", "nccl", "shm"}
    for features, ways in (
        ((), set[str]()),
        ((LATE_CHECKSUMS,), by_others),
        ((OFFER_STREAMS,), {"tcp"}),
        ((LATE_CHECKSUMS, OFFER_STREAMS), by_others | {"tcp"}),
    ):
        theirs = replace(MINE, worker_id="b", features=features)
        assert late_ways(MINE, theirs) == ways
        assert late_ways(MINE, replace(theirs, format=replace(MINE.format, block_size=8))) == set()


def test_other_weights_are_refused() -> None:
    with pytest.raises(TransferRejected, match="weights_hash: a has 'hash', b has 'x'"):
        compare(MINE, replace(MINE, worker_id="b", weights_hash="x"))


def test_too_old_protocol_is_refused() -> None:
    with pytest.raises(TransferRejected, match="protocol_version: at least 1 is required, a speaks 0"):
        compare(MINE, replace(MINE, protocol_version=0))


def test_unknown_checksum_policy_is_a_config_error_that_names_the_choices() -> None:
    assert KvTransferConfig(checksums="off").checksum_policy is ChecksumPolicy.OFF
    with pytest.raises(ConfigError, match=r"kvtransfer\.checksums must be one of full, off, got 'some'"):
        KvTransferConfig(checksums="some")
    with pytest.raises(ConfigError, match=r"kvtransfer\.offers_in_flight must be at least 1, got 0"):
        KvTransferConfig(offers_in_flight=0)
