"""Log-probabilities for the rows that ask: computed on the device behind the step, read when the step is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.types import TokenLogprob

SCORED_ROWS = 128  # whose logits are widened to float32 at once: what that takes beside the KV pool is bounded


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural-log probabilities under the raw distribution, in pinned memory or on their way there."""

    chosen: torch.Tensor  # float32 [rows], of the token asked about
    top_ids: torch.Tensor  # int32 [rows, top], likeliest first
    top_values: torch.Tensor  # float32 [rows, top]

    def read(self, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
        """One entry a row, with its ``tops[row]`` likeliest. Only once an event after ``queue_scores`` has passed."""
        chosen, ids, values = self.chosen.tolist(), self.top_ids.tolist(), self.top_values.tolist()
        return [
            TokenLogprob(token_id, chosen[row], tuple(zip(ids[row][:top], values[row][:top], strict=True)))
            for row, (token_id, top) in enumerate(zip(token_ids, tops, strict=True))
        ]


def queue_scores(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, top: int) -> Scores:
    """Score ``token_ids`` [n] and the ``top`` likeliest tokens under rows ``rows`` [n] of ``logits`` [.., vocab].

    Computed in float32 as ``baton.engine.sampler.logprob_of`` does; queued on torch's current stream, with the copy to
    the host, without waiting for it.
    """
    top = min(top, logits.shape[1])
    pieces = [
        _score(logits.index_select(0, some).float(), tokens, top)
        for some, tokens in zip(rows.split(SCORED_ROWS), token_ids.split(SCORED_ROWS), strict=True)
    ]
    return Scores(*(_to_host(torch.cat(parts)) for parts in zip(*pieces, strict=True)))


def indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 on ``device``, copied there as part of torch's current stream, without waiting for it."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def _score(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normalizer = torch.logsumexp(logits, dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids.long()[:, None]) - normalizer
    likeliest = torch.topk(logits, top, dim=1)
    return chosen[:, 0], likeliest.indices.int(), likeliest.values - normalizer


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
