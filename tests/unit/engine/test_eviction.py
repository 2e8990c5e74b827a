"""Who goes first when blocks run short: normal blocks by age, then kept ones by age, of which there is a bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.types import CacheClass
from baton.engine.blocks import BlockPool
from baton.engine.eviction import EvictionOrder

NORMAL, KEEP = CacheClass.NORMAL, CacheClass.KEEP


def left_behind(pool: BlockPool, count: int, root: str, cache_class: CacheClass = NORMAL) -> list[int]:
    """Blocks of a sequence that has ended, found under names that begin with ``root``."""
    allocation = pool.allocate([], count)
    assert allocation is not None
    for index, block in enumerate(allocation.blocks):
        pool.publish(block, f"{root}{index}".encode(), cache_class)
    pool.release(allocation.blocks)
    return allocation.blocks


def evicted(pool: BlockPool) -> list[int]:
    """All cached blocks, in the order in which they go."""
    free = pool.free
    blocks = [pool.grow() for _ in range(pool.available)]
    return [block for block in blocks[free:] if block is not None]


def test_kept_blocks_go_after_all_normal_ones_and_a_prefix_from_its_tail() -> None:
    pool = BlockPool(8, most_kept=4)
    kept = left_behind(pool, 2, "k", KEEP)
    normal = left_behind(pool, 3, "n")
    assert (pool.kept, pool.cached, pool.free) == (2, 5, 3)
    assert evicted(pool) == [*reversed(normal), *reversed(kept)]
    assert (pool.kept, pool.cached, pool.held) == (0, 0, 8)


def test_past_the_bound_what_was_kept_longest_becomes_the_youngest_normal_block() -> None:
    pool = BlockPool(8, most_kept=3)
    old = left_behind(pool, 2, "o", KEEP)
    normal = left_behind(pool, 1, "n")
    young = left_behind(pool, 2, "y", KEEP)
    assert pool.kept == 3
    assert evicted(pool) == [*normal, old[1], old[0], young[1], young[0]]


@pytest.mark.parametrize("asks", [False, True])
def test_a_block_that_has_become_a_normal_one_stays_so_until_somebody_asks_again(asks: bool) -> None:
    pool = BlockPool(4, most_kept=1)
    first, second = left_behind(pool, 1, "f", KEEP), left_behind(pool, 1, "s", KEEP)
    hit = pool.allocate([b"f0"], 1)
    assert hit is not None and hit.hits == 1
    if asks:
        pool.keep(hit.blocks)
    pool.release(hit.blocks)
    assert (pool.kept, pool.cached) == (1, 2)
    assert evicted(pool) == ([*second, *first] if asks else [*first, *second])


def test_without_a_share_kept_blocks_are_normal_ones() -> None:
    pool = BlockPool(4)
    kept, normal = left_behind(pool, 1, "k", KEEP), left_behind(pool, 1, "n")
    assert pool.kept == 0
    assert evicted(pool) == [*kept, *normal]


def test_a_block_is_kept_from_the_moment_on_that_somebody_asks_for_it() -> None:
    """As a hit, and as the content of a block that was computed twice."""
    pool = BlockPool(8, most_kept=4)
    hit, twice, other = (left_behind(pool, 1, root) for root in "hto")
    again = pool.allocate([b"h0"], 1)
    assert again is not None and again.hits == 1
    pool.keep(again.blocks)
    pool.release(again.blocks)
    private = pool.allocate([], 1)
    assert private is not None
    pool.publish(private.blocks[0], b"t0", KEEP)
    pool.release(private.blocks)
    assert pool.kept == 2
    assert evicted(pool) == [*other, *hit, *twice]


@pytest.mark.parametrize("by", ["eviction", "withdrawal"])
def test_a_block_whose_content_is_gone_is_kept_no_more(by: str) -> None:
    pool = BlockPool(1, most_kept=1)
    blocks = left_behind(pool, 1, "k", KEEP)
    if by == "withdrawal":
        pool.withdraw(blocks)
        assert (pool.free, pool.kept) == (1, 0)
    left_behind(pool, 1, "n")
    assert (pool.cached, pool.kept) == (1, 0)


class Model:
    """The same order, told in one list of ages."""

    def __init__(self, most_kept: int) -> None:
        self.most_kept = most_kept
        self.keeps: set[int] = set()
        self.idle: list[int] = []  # oldest first

    def add(self, block: int) -> None:
        self.idle.append(block)
        kept = [each for each in self.idle if each in self.keeps]
        if len(kept) > self.most_kept:
            self.keeps.discard(kept[0])
            self.idle.remove(kept[0])
            self.idle.append(kept[0])

    def keep(self, block: int) -> None:
        self.keeps.add(block)
        if block in self.idle:
            self.idle.remove(block)
            self.add(block)

    def evict(self) -> int:
        first = min(self.idle, key=lambda block: (block in self.keeps, self.idle.index(block)))
        self.idle.remove(first)
        self.keeps.discard(first)
        return first


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 3))
def test_any_use_evicts_in_the_order_of_class_and_age(data: st.DataObject, most_kept: int) -> None:
    order, model = EvictionOrder(most_kept), Model(most_kept)
    for _ in range(data.draw(st.integers(10, 60))):
        block = data.draw(st.integers(0, 5))
        match data.draw(st.sampled_from(["add", "remove", "keep", "evict"])):
            case "add" if block not in order:
                order.add(block)
                model.add(block)
            case "remove" if block in order:
                order.remove(block)
                model.idle.remove(block)
            case "keep":
                order.keep(block)
                model.keep(block)
            case "evict" if len(order):
                first = order.evict()
                order.forget(first)
                assert first == model.evict()
            case _:
                pass
        assert len(order) == len(model.idle)
        assert order.kept == len(model.keeps & set(model.idle)) <= most_kept
    assert [order.evict() for _ in range(len(order))] == [model.evict() for _ in range(len(model.idle))]
