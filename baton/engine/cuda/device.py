"""The GPU that an engine computes on, or why there is none."""

from __future__ import annotations

import torch

from baton.engine.cuda.build import CudaUnavailable

_HOPPER = (9, 0)


def gpu() -> torch.device:
    """The process's GPU. Raises CudaUnavailable when torch finds none."""
    if not torch.cuda.is_available():
        raise CudaUnavailable(f"engine.device: cuda needs a GPU and its driver, torch {torch.__version__} finds none")
    return torch.device("cuda", torch.cuda.current_device())


def hopper(device: torch.device) -> None:
    """Raises CudaUnavailable when ``device`` is not one that the kernels are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != _HOPPER:
        name = torch.cuda.get_device_name(device)
        raise CudaUnavailable(
            f"engine.backend: cuda needs a Hopper GPU (compute capability 9.0), {name} has {major}.{minor}; "
            "backend torch runs on any GPU"
        )
