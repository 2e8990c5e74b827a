"""Log-probabilities for the rows that ask: computed on the device behind the step, read when the step is collected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.cuda.sampler import Logprobs, logprobs


def indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 on ``device``, copied there as part of torch's current stream, without waiting for it."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def queue_scores(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, top: int) -> Logprobs:
    """``logprobs`` in pinned memory, to be read once an event recorded after this call has passed."""
    scores = logprobs(logits, rows, token_ids, top)
    return Logprobs(_to_host(scores.chosen), _to_host(scores.top_ids), _to_host(scores.top_values))


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
