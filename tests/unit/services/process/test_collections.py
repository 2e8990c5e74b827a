from __future__ import annotations

import gc

from services.process.process import _kept_from_collections  # pyright: ignore[reportPrivateUsage]


def test_no_collection_goes_through_what_the_start_has_made_while_a_service_serves() -> None:
    made: list[object] = [[] for _ in range(1000)]
    assert gc.is_tracked(made)
    with _kept_from_collections():
        assert gc.get_freeze_count() > len(made)
        assert not any(each is made for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(each is made for each in gc.get_objects())
