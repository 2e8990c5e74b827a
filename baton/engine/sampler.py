"""Draws the next token of each row: a pure function of (seed, position, logits), so batches change nothing.

Rows are reduced one by one wherever the order of a reduction could depend on the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.errors import BatonError
from baton.core.types import Sampling, TokenLogprob
from baton.engine.philox import uniform
from baton.engine.runner import Draw

# How many of the likeliest tokens are sorted first when top_p needs an order; the nucleus seldom is larger.
NUCLEUS_GUESS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """What to draw from one row of logits. ``context`` is prompt and output so far, split at ``draw.prompt_length``."""

    draw: Draw
    context: Sequence[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of a row: a token, or (``error``) why there is none."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: BatonError | None = None


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sample]:
    """Draw one token a row.

    ``logits`` is float32 [len(rows), vocab]. A row that is not finite yields an error for that row alone.
    """
    if not rows:
        return []
    best, ids = logits.max(dim=1)
    finite = torch.isfinite(best).tolist()
    greedy = ids.tolist()
    return [
        _result(logits[index], row, greedy[index]) if finite[index] else Sample(error=_not_finite(row))
        for index, row in enumerate(rows)
    ]


def logprob_of(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    """The log-probability of ``token_id`` and of the ``top`` likeliest tokens under raw ``logits`` [vocab]."""
    normalizer = torch.logsumexp(logits, dim=0)
    alternatives: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = torch.topk(logits, min(top, logits.numel()))
        alternatives = tuple(zip(ids.tolist(), (values - normalizer).tolist(), strict=True))
    return TokenLogprob(token_id, float(logits[token_id] - normalizer), alternatives)


def _not_finite(row: Row) -> BatonError:
    return BatonError(f"the model produced logits that are not finite at position {len(row.context)}")


def _result(logits: torch.Tensor, row: Row, greedy: int) -> Sample:
    draw = row.draw
    token_id = greedy if _is_plain(draw) else _draw(logits, row)
    logprob = None if draw.logprobs is None else logprob_of(logits, token_id, draw.logprobs)
    return Sample(token_id=token_id, logprob=logprob)


def _is_plain(draw: Draw) -> bool:
    sampling = draw.sampling
    untouched = not draw.forbidden and not sampling.logit_bias and not sampling.has_penalties
    return sampling.temperature == 0 and untouched


def _draw(raw: torch.Tensor, row: Row) -> int:
    sampling = row.draw.sampling
    logits = raw.clone()
    if sampling.has_penalties:
        _penalize(logits, sampling, row)
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    if row.draw.forbidden:
        logits[list(row.draw.forbidden)] = -torch.inf
    if sampling.temperature == 0:
        return int(logits.argmax())
    weights = torch.softmax(logits.double() / sampling.temperature, dim=0)
    weights = _filtered(weights, sampling)
    return _invert(weights, uniform(sampling.seed, len(row.context)))


def _penalize(logits: torch.Tensor, sampling: Sampling, row: Row) -> None:
    output = Counter(row.context[row.draw.prompt_length :])
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.context)), dtype=torch.long, device=logits.device)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output:
        ids = torch.tensor(list(output), dtype=torch.long, device=logits.device)
        counts = torch.tensor(list(output.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _filtered(weights: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero what top-k, then top-p, then min-p leave out; tokens that tie with the last one kept stay in."""
    if 0 < sampling.top_k < weights.numel():
        smallest = torch.topk(weights, sampling.top_k).values[-1]
        weights = torch.where(weights >= smallest, weights, 0.0)
    if sampling.top_p < 1.0:
        smallest = _nucleus_edge(weights, sampling.top_p)
        weights = torch.where(weights >= smallest, weights, 0.0)
    if sampling.min_p > 0.0:
        weights = torch.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
    return weights


def _nucleus_edge(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest weight inside the smallest set of likeliest tokens whose share reaches ``top_p``."""
    wanted = top_p * weights.sum()
    for size in (min(NUCLEUS_GUESS, weights.numel()), weights.numel()):
        likeliest = torch.topk(weights, size).values
        reached = torch.cumsum(likeliest, dim=0)
        if reached[-1] >= wanted or size == weights.numel():
            index = int(torch.searchsorted(reached, wanted).clamp(max=size - 1))
            return likeliest[index]
    raise AssertionError("unreachable: the second size covers every token")


def _invert(weights: torch.Tensor, share: float) -> int:
    """The token at which the cumulative weight, in order of ids, passes ``share`` of the whole."""
    reached = torch.cumsum(weights, dim=0)
    index = int(torch.searchsorted(reached, share * reached[-1], right=True))
    if index < weights.numel() and weights[index] > 0:
        return index
    return int(torch.nonzero(weights)[-1])  # rounding at the very end of the scale
