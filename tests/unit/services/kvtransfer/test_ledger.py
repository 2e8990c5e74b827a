"""A copy that follows the ledger's changes is what is held, whatever came and went between two looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import TierChanges
from services.kvtransfer.ledger import Ledger

NAMES = st.sampled_from([bytes([n]) for n in range(6)])
EPOCH = 5


def test_what_is_on_two_levels_is_held_until_it_has_left_both() -> None:
    ledger = Ledger(EPOCH)
    ledger.entered(b"a")
    ledger.entered(b"a")
    seen = ledger.since(EPOCH, 0)
    assert (seen.added, seen.removed) == ((b"a",), ())
    ledger.left(b"a")
    assert ledger.since(EPOCH, seen.version) == TierChanges(EPOCH, seen.version, is_all=False)
    ledger.left(b"a")
    assert ledger.since(EPOCH, seen.version).removed == (b"a",)


def test_who_has_not_asked_for_too_long_gets_everything() -> None:
    ledger = Ledger(EPOCH, gone_kept=1)
    for name in (b"a", b"b", b"c"):
        ledger.entered(name)
    seen = ledger.since(EPOCH, 0)
    ledger.left(b"a")
    assert not ledger.since(EPOCH, seen.version).is_all
    ledger.left(b"b")
    then = ledger.since(EPOCH, seen.version)
    assert then.is_all and then.added == (b"c",)
    assert ledger.since(EPOCH + 1, then.version).is_all
    assert ledger.since(EPOCH, then.version + 1).is_all  # of another life with the same number


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=60), st.integers(1, 4))
def test_a_copy_stays_equal(moves: list[tuple[bytes, bool]], kept: int) -> None:
    ledger, held, copy, known = Ledger(EPOCH, gone_kept=kept), set[bytes](), set[bytes](), (0, 0)
    for name, looks in moves:
        if name in held:
            held.remove(name)
            ledger.left(name)
        else:
            held.add(name)
            ledger.entered(name)
        if looks:
            changes = ledger.since(*known)
            copy = set() if changes.is_all else copy
            copy = (copy - set(changes.removed)) | set(changes.added)
            known = (changes.epoch, changes.version)
            assert copy == held
