"""Weights that are read when they are asked for, so that a backend which packs its own copy needs no second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from baton.engine.models.architecture import TensorLayout


class OnDemandWeights(Mapping[str, torch.Tensor]):
    """Every access makes the tensor anew; ``dict(weights)`` keeps them all."""

    def __init__(self, layouts: Iterable[TensorLayout], make: Callable[[TensorLayout], torch.Tensor]) -> None:
        self._layouts = {layout.name: layout for layout in layouts}
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._make(self._layouts[name])

    def __contains__(self, name: object) -> bool:
        return name in self._layouts

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)
