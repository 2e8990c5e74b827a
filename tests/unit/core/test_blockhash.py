from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.blockhash import block_hashes, root_hash

ROOT = root_hash(salt=b"s", weights_hash="w", kv_format="f")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, st.sampled_from([1, 2, 4, 16]))
def test_only_full_blocks_are_hashed(tokens: list[int], size: int) -> None:
    assert len(list(block_hashes(ROOT, tokens, size))) == len(tokens) // size


@given(TOKENS, TOKENS)
def test_hashes_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int]) -> None:
    a, b = list(block_hashes(ROOT, left, 4)), list(block_hashes(ROOT, right, 4))
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        end = 4 * (index + 1)
        assert (x == y) == (left[:end] == right[:end])


def test_root_depends_on_every_part() -> None:
    parts = {"salt": b"s", "weights_hash": "w", "kv_format": "f", "adapter": "a", "module": "m"}
    roots = {root_hash(**parts)}  # type: ignore[arg-type]
    for name, value in parts.items():
        roots.add(root_hash(**parts | {name: value + value}))  # type: ignore[arg-type,operator]
    roots.add(root_hash(salt=b"sw", weights_hash="", kv_format="f", adapter="a", module="m"))
    roots.add(root_hash(salt=b"s", weights_hash="w", kv_format="f", adapter="a"))
    assert len(roots) == 8
