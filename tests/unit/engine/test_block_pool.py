from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.types import CacheClass
from baton.engine.blocks import BlockPool


def names(count: int, root: str = "a") -> list[bytes]:
    return [f"{root}{i}".encode() for i in range(count)]


def take(pool: BlockPool, count: int, hashes: list[bytes] | None = None) -> list[int]:
    allocation = pool.allocate(hashes or [], count)
    assert allocation is not None
    return allocation.blocks


def publish(pool: BlockPool, blocks: list[int], hashes: list[bytes]) -> None:
    for block, name in zip(blocks, hashes, strict=True):
        pool.publish(block, name)


def test_gives_every_block_once_and_then_none() -> None:
    pool = BlockPool(4)
    assert sorted(take(pool, 4)) == [0, 1, 2, 3]
    assert pool.allocate([], 1) is None
    assert pool.grow() is None
    assert (pool.free, pool.held, pool.cached) == (0, 4, 0)


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 2)
    publish(pool, blocks, names(2))
    assert pool.allocate(names(2), 5) is None
    pool.release(blocks)
    assert (pool.free, pool.held, pool.cached) == (2, 0, 2)


def test_finds_the_longest_known_prefix() -> None:
    pool = BlockPool(8)
    blocks = take(pool, 3)
    publish(pool, blocks, names(3))
    pool.release(blocks)
    allocation = pool.allocate([*names(2), b"other", *names(1, "z")], 5)
    assert allocation is not None
    assert allocation.hits == 2
    assert allocation.blocks[:2] == blocks[:2]
    assert (pool.held, pool.cached, pool.free) == (5, 1, 2)


def test_counts_a_shared_block_once_and_frees_it_with_its_last_user() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 1)
    publish(pool, blocks, names(1))
    assert take(pool, 1, names(1)) == blocks
    assert pool.held == 1
    pool.release(blocks)
    assert (pool.held, pool.cached) == (1, 0)
    pool.release(blocks)
    assert (pool.held, pool.cached) == (0, 1)


def test_evicts_the_oldest_and_a_prefix_from_its_tail() -> None:
    pool = BlockPool(4)
    old, young = take(pool, 2), take(pool, 2)
    publish(pool, old, names(2, "old"))
    publish(pool, young, names(2, "young"))
    pool.release(old)
    pool.release(young)
    assert take(pool, 1) == [old[1]]
    assert take(pool, 1) == [old[0]]
    assert take(pool, 1) == [young[1]]


def test_does_not_evict_the_prefix_that_the_same_request_shares() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    publish(pool, blocks, names(3))
    pool.release(blocks)
    assert not pool.can_allocate(names(3), 5)
    assert pool.can_allocate(names(3), 4)
    allocation = pool.allocate(names(3), 4)
    assert allocation is not None
    assert allocation.hits == 3


def test_a_duplicate_stays_private_and_is_freed() -> None:
    pool = BlockPool(4)
    first, second = take(pool, 1), take(pool, 1)
    publish(pool, first, names(1))
    publish(pool, second, names(1))
    pool.release(second)
    assert (pool.free, pool.cached) == (3, 0)


def test_a_block_is_not_reused_while_a_launched_step_may_touch_it() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 2)
    pool.launch(1)
    pool.launch(2)
    pool.release(blocks)
    pool.finish(1)
    assert (pool.held, pool.available) == (2, 0)
    pool.finish(2)
    assert (pool.held, pool.available) == (0, 2)


def test_a_fenced_block_may_be_found_and_released_again() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1)
    publish(pool, blocks, names(1))
    pool.launch(1)
    pool.release(blocks)
    assert take(pool, 1, names(1)) == blocks
    pool.finish(1)
    assert (pool.held, pool.cached, pool.free) == (1, 0, 1)
    pool.release(blocks)
    assert (pool.held, pool.cached, pool.free) == (0, 1, 1)


def test_withdrawn_content_is_never_found_again() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 2)
    publish(pool, blocks, names(2))
    pool.release(blocks[1:])
    pool.withdraw(blocks)
    assert pool.names() == ()
    assert (pool.free, pool.held, pool.cached) == (3, 1, 0)
    pool.release(blocks[:1])
    assert pool.free == 4


def test_changes_are_numbered_without_gaps_and_hold_the_net_effect() -> None:
    pool = BlockPool(1)
    assert pool.take_change() is None
    block = take(pool, 1)
    publish(pool, block, names(1, "a"))
    first = pool.take_change()
    assert first is not None
    assert (first.sequence, first.added, first.removed) == (1, (b"a0",), ())
    pool.release(block)
    publish(pool, take(pool, 1), names(1, "b"))
    second = pool.take_change()
    assert second is not None
    assert (second.sequence, second.added, second.removed) == (2, (b"b0",), (b"a0",))
    pool.withdraw(block)
    publish(pool, block, names(1, "b"))
    assert pool.take_change() is None


class Trial:
    """A pool, the sequences that hold its blocks, and a mirror of its cache fed with changes only."""

    def __init__(self, total: int, most_kept: int) -> None:
        self.pool = BlockPool(total, most_kept)
        self.most_kept = most_kept
        self.live: list[list[int]] = []
        self.mirror: set[bytes] = set()
        self.step = 0
        self.in_flight = False

    def allocate(self, data: st.DataObject) -> None:
        hashes = names(data.draw(st.integers(0, 4)), data.draw(st.sampled_from("ab")))
        allocation = self.pool.allocate(hashes, data.draw(st.integers(len(hashes), 6)))
        if allocation is not None:
            fresh = set(allocation.blocks[allocation.hits :])
            assert not fresh & {block for blocks in self.live for block in blocks}
            self.live.append(allocation.blocks)
            self.pool.keep(allocation.blocks[: data.draw(st.integers(0, allocation.hits))])

    def fence(self, data: st.DataObject) -> None:
        if self.in_flight:
            self.pool.finish(self.step)
        else:
            self.step += 1
            self.pool.launch(self.step)
        self.in_flight = not self.in_flight

    def touch(self, data: st.DataObject) -> None:
        if not self.live:
            return
        blocks = data.draw(st.sampled_from(self.live))
        match data.draw(st.sampled_from(["release", "publish", "withdraw", "grow"])):
            case "release":
                self.live.remove(blocks)
                self.pool.release(blocks)
            case "publish":
                cache_class = data.draw(st.sampled_from([CacheClass.NORMAL, CacheClass.KEEP]))
                for block, name in zip(blocks, names(len(blocks), data.draw(st.sampled_from("ab"))), strict=True):
                    self.pool.publish(block, name, cache_class)
            case "withdraw":
                self.pool.withdraw(blocks)
            case _:
                block = self.pool.grow()
                assert block is None or not any(block in other for other in self.live)
                blocks += [] if block is None else [block]

    def check(self) -> None:
        pool, change = self.pool, self.pool.take_change()
        if change is not None:
            self.mirror = (self.mirror - set(change.removed)) | set(change.added)
        assert self.mirror == set(pool.names())
        assert pool.free + pool.held + pool.cached == pool.total
        assert pool.kept <= min(pool.cached, self.most_kept)
        referenced = len({block for blocks in self.live for block in blocks})
        assert pool.held == referenced or (self.in_flight and pool.held > referenced)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_are_conserved_whatever_happens(data: st.DataObject) -> None:
    trial = Trial(data.draw(st.integers(1, 12)), data.draw(st.integers(0, 6)))
    for _ in range(data.draw(st.integers(1, 40))):
        data.draw(
            st.sampled_from([trial.allocate, trial.allocate, trial.touch, trial.touch, trial.touch, trial.fence])
        )(data)
        trial.check()
    if trial.in_flight:
        trial.fence(data)
    for blocks in trial.live:
        trial.pool.release(blocks)
    assert (trial.pool.held, trial.pool.available) == (0, trial.pool.total)
