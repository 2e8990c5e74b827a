"""Steps of every kind on made-up sequences, so that nothing is loaded, tuned or allocated when real ones come."""

from __future__ import annotations

from collections.abc import Iterator

from baton.core.types import Module, Sampling
from baton.engine.cuda.gemm import TUNED_ROWS
from baton.engine.cuda.runner import CudaRunner
from baton.engine.cuda.scores import SCORED_ROWS
from baton.engine.cuda.step_arrays import BatchShape
from baton.engine.runner import Draw, Part
from baton.engine.spec import DecoderSpec

_BLOCK = 0  # every made-up sequence writes here; the pool holds nothing yet
_TOKEN = 0
_MOST_SCORES = 20
_NARROW = 16  # tokens
_GREEDY = Sampling()
_DRAWN = Sampling(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((_TOKEN, 1.0),),
)


def warm_up(runner: CudaRunner, shape: BatchShape, spec: DecoderSpec) -> None:
    """Run prefills of every size that has products of its own, the largest one in both ways to draw, with windows and
    with decode rows, every captured batch, log-probabilities, and a copy of blocks."""
    for tokens in TUNED_ROWS:
        if tokens < shape.tokens:
            chunks = list(_chunks(tokens, shape, spec, Draw(_GREEDY, 1)))
            _run(runner, chunks)
            _forget(runner, chunks)
    has_windows = Module.ATTENTION_WINDOW in runner.card.modules
    for sampling, window in ((_GREEDY, None), (_DRAWN, None), *([(_GREEDY, _NARROW)] if has_windows else [])):
        chunks = [part._replace(window=window) for part in _chunks(shape.tokens, shape, spec, Draw(sampling, 1))]
        decoding = [_next(part) for part in chunks]
        _run(runner, chunks, decoding, decoding)
        _forget(runner, chunks)
    for bucket in shape.buckets:
        batch = [_part(-1 - row, 0, 1, shape, Draw(_GREEDY, 1)) for row in range(bucket)]
        _run(runner, batch, [_next(part) for part in batch])
        _forget(runner, batch)
    _score(runner, shape, spec)
    runner.write_blocks([_BLOCK], runner.read_blocks([_BLOCK]))


def _score(runner: CudaRunner, shape: BatchShape, spec: DecoderSpec) -> None:
    """A scored prompt beside a sequence that decodes."""
    top = min(_MOST_SCORES, spec.vocab_size)
    draw = Draw(_DRAWN, 1, (_TOKEN,), top)
    length = min(SCORED_ROWS + 2, shape.tokens - 1, spec.context_length)
    if length < 2 or shape.rows < 2:
        return
    beside = _part(-1, 0, 1, shape, draw)
    scored = _part(-2, 0, length, shape, draw)._replace(prompt_logprobs=top, targets=[_TOKEN] * (length - 1))
    _run(runner, [beside], [_next(beside), scored])
    _forget(runner, [beside, scored])


def _chunks(tokens: int, shape: BatchShape, spec: DecoderSpec, draw: Draw) -> Iterator[Part]:
    """Sequences with ``tokens`` tokens together, as far as a step takes them; each has room for one more."""
    left = tokens
    for row in range(shape.rows):
        length = min(left, spec.context_length - 1)
        if length < 1:
            return
        yield _part(-1 - row, 0, length, shape, draw)
        left -= length


def _part(key: int, start: int, end: int, shape: BatchShape, draw: Draw) -> Part:
    return Part(key, [_TOKEN] * end, start, end, [_BLOCK] * (end // shape.block_size + 1), draw)


def _next(part: Part) -> Part:
    """The part of the token that ``part`` draws."""
    return part._replace(context=[*part.context, _TOKEN], start=part.end, end=part.end + 1)


def _run(runner: CudaRunner, *steps: list[Part]) -> None:
    """Launch the steps as far ahead as the runner takes them."""
    for ahead, parts in enumerate(steps):
        runner.launch(parts)
        if ahead >= runner.steps_ahead:
            runner.collect()
    for _ in range(min(len(steps), runner.steps_ahead)):
        runner.collect()


def _forget(runner: CudaRunner, parts: list[Part]) -> None:
    for part in parts:
        runner.forget(part.key)
