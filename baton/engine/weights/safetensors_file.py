"""Writes a safetensors file in bfloat16 as a stream, so that no more than one piece of a tensor is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_BYTES = 2


@dataclass(frozen=True, slots=True)
class Bfloat16Tensor:
    """One tensor to write; ``pieces`` yields its float32 values in order, as many at a time as it likes."""

    name: str
    shape: tuple[int, ...]
    pieces: Iterable[NDArray[np.float32]]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * _BYTES


def write_bfloat16(path: Path, tensors: list[Bfloat16Tensor]) -> Iterator[int]:
    """Write ``tensors`` to ``path``; yields the number of data bytes of each piece once it is written.

    Layout: header length (8 bytes, little endian), JSON header, data (the safetensors format description).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces:
                data = to_bfloat16(piece).tobytes()
                file.write(data)
                written += len(data)
                yield len(data)
            if written != tensor.size:
                raise ValueError(f"tensor {tensor.name}: pieces hold {written} bytes, shape takes {tensor.size}")


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of finite ``values`` rounded to bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
