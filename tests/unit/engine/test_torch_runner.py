"""When the reference runner lets others look, on a CPU and over a pool that copies go out of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.fake import fake_card
from baton.engine.fake_device import FakeCopies
from baton.engine.sharedpool import shared_pool_memory
from baton.engine.torch_runner import TorchRunner


class Half:
    """A decoder that notes which half of a step it computes."""

    spec: Any = None
    dtype = torch.float32

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def forward(self, step: Any, pool: torch.Tensor) -> torch.Tensor:
        return self.fill(step, pool)()

    def fill(self, step: Any, pool: torch.Tensor) -> Any:
        self._seen.append("fill")

        def finish() -> torch.Tensor:
            self._seen.append("finish")
            return torch.zeros(0, 8)

        return finish


@pytest.mark.parametrize("has_copies", [False, True], ids=["on a CPU", "with copies beside the steps"])
def test_nobody_looks_while_kernels_are_queued_whose_memory_a_copy_could_take(
    has_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: seen.append("idle"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: stream)
    card, copies = fake_card(), None
    if has_copies:
        memory = shared_pool_memory(1, card.format)
        assert memory is not None
        copies = FakeCopies(memory, lambda _: None)
    runner = TorchRunner(Half(seen), torch.zeros(1), card, copies=copies)
    runner.while_waiting(lambda: seen.append("look"))
    monkeypatch.setattr("baton.engine.torch_runner._pack", lambda *_: None)
    runner.launch([])
    runner.collect()
    if copies is not None:
        copies.close()
    assert seen == (["fill", "finish", "idle"] if has_copies else ["fill", "look", "finish"])
