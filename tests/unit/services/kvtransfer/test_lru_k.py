"""LRU-K against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer.lru_k import LruK

A, B, C = b"a", b"b", b"c"


def test_a_block_used_once_goes_before_one_used_twice_however_recent() -> None:
    order = LruK()
    for name in (A, A, B):
        order.use(name)
    assert order.victim() == B


def test_the_last_but_one_use_decides_among_blocks_used_twice() -> None:
    order = LruK()
    for name in (A, B, B, A):  # A was used last, but its use before that is the oldest
        order.use(name)
    assert order.victim() == A


def test_a_pinned_block_is_no_victim_until_it_is_unpinned() -> None:
    order = LruK()
    for name in (A, B):
        order.use(name)
    order.pin(A)
    assert order.victim() == B
    order.pin(B)
    assert order.victim() is None
    order.unpin(A)
    assert order.victim() == A


def test_what_is_forgotten_starts_anew() -> None:
    order = LruK()
    for name in (A, A, B, B):
        order.use(name)
    order.forget(A)
    assert A not in order and len(order) == 1
    order.use(A)
    assert order.victim() == A


def expected_victim(uses: list[bytes], known: set[bytes], pinned: set[bytes], k: int) -> bytes | None:
    """The definition: fewer than K uses first, then the oldest K-th last use; the oldest last use breaks ties."""

    def rank(name: bytes) -> tuple[int, int]:
        times = [time for time, used in enumerate(uses) if used == name]
        return (times[-k] if len(times) >= k else -1, times[-1])

    return min(known - pinned, key=rank, default=None)


steps = st.lists(st.tuples(st.sampled_from(["use", "use", "use", "pin", "unpin"]), st.sampled_from([A, B, C, b"d"])))


@given(steps, st.integers(1, 3))
def test_the_victim_is_always_the_one_that_the_definition_names(actions: list[tuple[str, bytes]], k: int) -> None:
    order, uses, pinned = LruK(k), [], set()
    for action, name in actions:
        if action == "use":
            order.use(name)
            uses.append(name)
        elif action == "pin":
            order.pin(name)
            pinned |= {name} & set(uses)
        else:
            order.unpin(name)
            pinned.discard(name)
        assert order.victim() == expected_victim(uses, set(uses), pinned, k)


def test_memory_does_not_grow_with_uses() -> None:
    order = LruK()
    for _ in range(10_000):
        order.use(A)
    assert len(order._heap) < 100
