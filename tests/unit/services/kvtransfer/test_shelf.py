from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer.shelf import Shelf


def test_the_oldest_leaves_when_the_bytes_are_used_up() -> None:
    shelf = Shelf(10)
    assert shelf.add(b"a", 4) == [] and shelf.add(b"b", 4) == []
    assert shelf.add(b"c", 8) == [b"a", b"b"]
    assert shelf.bytes == 8 and b"c" in shelf and b"a" not in shelf


def test_what_is_larger_than_the_shelf_drives_nobody_out() -> None:
    shelf = Shelf(10)
    shelf.add(b"a", 4)
    assert shelf.add(b"b", 11) is None
    assert b"a" in shelf and shelf.bytes == 4


def test_pinned_blocks_stay_and_others_find_no_place_beside_them() -> None:
    shelf = Shelf(10)
    shelf.add(b"a", 8)
    shelf.pin([b"a"])
    assert shelf.add(b"b", 4) is None
    shelf.unpin([b"a"])
    assert shelf.add(b"b", 4) == [b"a"]


def test_a_pin_waits_for_its_block() -> None:
    shelf = Shelf(10)
    shelf.pin([b"a"])
    shelf.add(b"a", 8)
    assert shelf.add(b"b", 4) is None
    shelf.remove(b"a")
    assert shelf.add(b"b", 10) == []


names = st.sampled_from([bytes([n]) for n in range(8)])


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "use", "pin", "unpin"]), names, st.integers(1, 6))))
def test_bytes_are_counted_and_bounded_and_pins_hold(actions: list[tuple[str, bytes, int]]) -> None:
    shelf, here, pins = Shelf(12), {}, set()
    for action, name, size in actions:
        if action == "add" and name not in here:
            evicted = shelf.add(name, size)
            assert not pins & set(evicted or ())
            for gone in evicted or ():
                del here[gone]
            if evicted is not None:
                here[name] = size
            else:
                assert sum(here[each] for each in pins & here.keys()) + size > 12
        elif action == "remove":
            shelf.remove(name)
            here.pop(name, None)
        elif action == "use":
            shelf.use([name])
        elif action == "pin":
            shelf.pin([name])
            pins.add(name)
        elif action == "unpin":
            shelf.unpin([name])
            pins.discard(name)
        assert shelf.bytes == sum(here.values()) <= 12
        assert len(shelf) == len(here) and all(each in shelf for each in here)
