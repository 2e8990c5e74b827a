"""Log-probabilities for the rows that ask: computed on the device behind the step, read when the step is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.types import TokenLogprob


def pinned_copy(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 on ``device``, copied there as part of the stream, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities on their way to the host. Ids travel as float32, which holds every id below 2^24 exactly."""

    table: torch.Tensor  # pinned float32 [rows, 2 + 2 * top]: id, logprob, then the likeliest ids and their logprobs
    top: int

    def read(self) -> tuple[TokenLogprob, ...]:
        """One entry a row, once the step's event has passed."""
        return tuple(self._entry(row) for row in self.table.tolist())

    def _entry(self, row: list[float]) -> TokenLogprob:
        ids, values = row[2 : 2 + self.top], row[2 + self.top :]
        return TokenLogprob(int(row[0]), row[1], tuple((int(i), value) for i, value in zip(ids, values, strict=True)))


def queue_scores(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> Scores:
    """Score ``token_ids`` int [rows] and the ``top`` likeliest tokens of each row under raw ``logits`` [rows, vocab].

    Queued on torch's current stream, with the copy to the host.
    """
    logits = logits.float()
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    ids = token_ids.to(torch.int64)[:, None]
    columns = [ids.float(), logits.gather(1, ids) - normalizer]
    top = min(top, logits.shape[1])
    if top:
        likeliest = torch.topk(logits, top, dim=-1)
        columns += [likeliest.indices.float(), likeliest.values - normalizer]
    table = torch.cat(columns, dim=1)
    host = torch.empty(table.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(table, non_blocking=True)
    return Scores(host, top)
