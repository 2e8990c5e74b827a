"""FP8 weights and FP8 KV: what they lose against float32, and how often smollm2 still says what it said.

The reference rounds to the same formats in plain torch. An engine that loses more than that has a fault of its own.
``pytest -rP`` shows the figures of the gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.cuda.build import build
from baton.engine.cuda.fp8_weights import PRODUCTS, quantize_channels
from baton.engine.cuda.kernels import E4M3_MAX, Kernels, Overlap
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.runner import CudaRunner
from baton.engine.decoder import PackedStep
from baton.engine.kvcache import allocate_pool
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from tests.goldens import DATA, Golden, read_goldens
from tests.gpu.gpu_engines import (
    BLOCK,
    DEVICE,
    Line,
    Reference,
    all_logits,
    cuda_runner,
    decode_logits,
    distance,
    lines,
    prefill,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

E4M3 = torch.float8_e4m3fn
FORMATS = {
    "weights": {"weight_format": "fp8"},
    "kv": {"kv_format": "fp8"},
    "both": {"weight_format": "fp8", "kv_format": "fp8"},
}
MODELS = (str(DATA / "tiny" / "qwen2"), "random:smollm2-135m")  # one with biases, one with many layers
# Times what rounding alone loses. Prefill over FP8 KV rounds queries and softmax weights too, which the reference does
# not: by emulation 1.07 to 1.27 times the loss.
NO_WORSE = {"weights": 1.25, "kv": 1.4, "both": 1.3}


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    return CudaLibrary(build())


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 576), (64, 1536), (257, 14_336), (2, 32_768), (5, 8)])
def test_a_row_is_rounded_by_its_own_largest_magnitude(
    library: CudaLibrary, rows: int, width: int, overlap: Overlap
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = torch.randn(rows, width, generator=generator, device=DEVICE).to(torch.bfloat16)
    x *= torch.logspace(-3, 3, rows, device=DEVICE).to(torch.bfloat16)[:, None]
    values = torch.full((rows, width), 0x7F, dtype=torch.uint8, device=DEVICE).view(E4M3)
    scales = torch.full((rows,), float("nan"), device=DEVICE)
    Kernels(library, DEVICE, overlap).quantize(x, values, scales)
    largest = x.float().abs().amax(dim=1)
    assert torch.equal(scales, largest / E4M3_MAX)
    wanted = (x.float() * (E4M3_MAX / largest)[:, None]).to(E4M3)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))


def test_a_row_of_zeros_rounds_to_zeros_and_a_nan_stays_one(library: CudaLibrary) -> None:
    x = torch.ones(3, 64, device=DEVICE, dtype=torch.bfloat16)
    x[0], x[1, 5] = 0, float("nan")
    values, scales = torch.ones(3, 64, device=DEVICE).to(E4M3), torch.ones(3, device=DEVICE)
    Kernels(library, DEVICE).quantize(x, values, scales)
    assert not values[0].float().any()
    assert values[1].float().isnan().sum() == 1
    assert scales.isfinite().all()
    assert torch.equal(values[2].float() * scales[2], torch.ones(64, device=DEVICE))


# --- the model --------------------------------------------------------------------------------------------------------


class RoundingDecoder(TorchDecoder):
    """The reference in bf16 with the layers' products of e4m3 operands: scales by channel and by row."""

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name.rsplit(".", 1)[-1] not in PRODUCTS:
            return super()._linear(x, name)
        values, scale = quantize_channels(self._weights[f"{name}.weight"])
        largest = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        rounded = (x.float() * (E4M3_MAX / largest)).to(E4M3).float() * (largest / E4M3_MAX)
        product = (rounded @ (values.float() * scale[:, None]).t()).to(self.dtype)
        bias = self._weights.get(f"{name}.bias")
        return product if bias is None else product + bias


class RoundingReference:
    """Logits of whole contexts with the roundings of ``formats``."""

    def __init__(self, model: str, formats: Mapping[str, str]) -> None:
        self._spec = load_spec(model)
        kind = RoundingDecoder if "weight_format" in formats else TorchDecoder
        self._kv_dtype = E4M3 if "kv_format" in formats else torch.bfloat16
        self._decoder = kind(self._spec, load_weights(model, self._spec, torch.bfloat16, DEVICE), torch.bfloat16)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab]."""
        count = len(tokens)
        blocks = -(-count // BLOCK)
        step = PackedStep(
            token_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.arange(count, dtype=torch.int32),
            seq_starts=torch.tensor([0, count], dtype=torch.int32),
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            logit_rows=torch.arange(count, dtype=torch.int32),
        )
        return self._decoder.forward(step, allocate_pool(self._spec, blocks, BLOCK, self._kv_dtype, DEVICE))


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.rsplit("/", 1)[-1])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runner(model: str, kind: str) -> Iterator[CudaRunner]:
    with cuda_runner(model, **FORMATS[kind]) as made:
        yield made


@pytest.fixture(scope="module")
def exact(model: str) -> Reference:
    return Reference(model, torch.float32)


@pytest.fixture(scope="module")
def rounding(model: str, kind: str) -> RoundingReference:
    return RoundingReference(model, FORMATS[kind])


def test_prompts_lose_what_rounding_loses(
    runner: CudaRunner, kind: str, exact: Reference, rounding: RoundingReference
) -> None:
    made = lines([1, 70, 33, 64, 17], exact.spec.vocab_size)
    found = all_logits(runner, [line.part(len(line.tokens)) for line in made])
    for line in made:
        runner.forget(line.key)
    wanted = torch.cat([exact.logits(line.tokens) for line in made])
    allowed = distance(torch.cat([rounding.logits(line.tokens) for line in made]), wanted)
    assert distance(found, wanted) <= NO_WORSE[kind] * allowed


def test_decoding_loses_what_rounding_loses(
    runner: CudaRunner, kind: str, exact: Reference, rounding: RoundingReference
) -> None:
    """In batches of every kind: fused products for few rows, plain ones for more; over block boundaries."""
    for count in (1, 4, 20):
        made = lines([5 + 7 * index % 45 for index in range(count)], exact.spec.vocab_size, seed=count)
        prefill(runner, made)
        found = [decode_logits(runner, made)[1] for _ in range(BLOCK + 2)]
        for line in made:
            runner.forget(line.key)
        wanted = torch.cat([exact.logits(line.tokens[:-1])[-len(found) :] for line in made])
        allowed = distance(torch.cat([rounding.logits(line.tokens[:-1])[-len(found) :] for line in made]), wanted)
        assert distance(torch.stack(found, dim=1).flatten(0, 1), wanted) <= NO_WORSE[kind] * allowed, count


def test_graphs_compute_the_same_bits_as_eager_launches(runner: CudaRunner, exact: Reference) -> None:
    for count in (1, 2, 7, 8, 20):
        made = lines([3 + index for index in range(count)], exact.spec.vocab_size, seed=count, room=20)
        prefill(runner, made)
        eager, replayed = decode_logits(runner, made)
        assert torch.equal(eager, replayed), count
        for line in made:
            runner.forget(line.key)


def test_blocks_travel_as_they_lie_and_are_half_as_large() -> None:
    with cuda_runner(MODELS[1]) as wide, cuda_runner(MODELS[1], kv_format="fp8") as narrow:
        assert 2 * narrow.card.format.block_bytes == wide.card.format.block_bytes
        assert narrow.card.format != wide.card.format
        made = lines([40], narrow.card.vocab_size)
        prefill(narrow, made)
        data = narrow.read_blocks(made[0].blocks[:3])
        assert len(data) == 3 * narrow.card.format.block_bytes
        narrow.write_blocks([200, 201, 202], data)
        assert narrow.read_blocks([200, 201, 202]) == data


def test_engines_with_other_weights_do_not_share_keys_and_values() -> None:
    with cuda_runner(MODELS[0]) as wide, cuda_runner(MODELS[0], weight_format="fp8") as narrow:
        assert narrow.card.weights_hash != wide.card.weights_hash


def test_the_experts_of_a_mixture_are_not_rounded_behind_ones_back() -> None:
    with (
        pytest.raises(ConfigError, match=r"engine\.weight_format: must be auto for a mixture of experts"),
        cuda_runner(str(DATA / "tiny" / "mixtral"), weight_format="fp8"),
    ):
        pass


# --- the gate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Over all output tokens of the goldens, each after the golden tokens before it."""

    tokens: int
    same: float  # share whose most likely token is the golden one
    logprob: float  # of the golden token, mean


# Least share of smollm2's golden tokens that stay the most likely. It is a hard case: 135 M parameters, its file's own
# weights have four bits, and bf16 alone changes 2.6 % of the tokens. An emulation in float32 on a CPU, over 1,722 of
# the tokens, gives 92.4 % for weights, 94.9 % for KV with queries and softmax weights rounded as in prefill (95.5 %
# without), and 91 % for both; the standard error is 0.7 %.
GATE = {"weights": 0.90, "kv": 0.92, "both": 0.88}


@pytest.fixture(scope="module")
def in_bf16(smollm2_directory: Path) -> list[Agreement]:
    return _measure(smollm2_directory, {})


@pytest.mark.parametrize("kind", FORMATS)
def test_smollm2_still_says_what_it_said(smollm2_directory: Path, in_bf16: list[Agreement], kind: str) -> None:
    found = _measure(smollm2_directory, FORMATS[kind])
    for way, before, after in zip(("prefill", "decode"), in_bf16, found, strict=True):
        print(f"{kind}, {way}: {after} instead of {before}")
        assert after.same >= GATE[kind], way


def _measure(directory: Path, formats: Mapping[str, str]) -> list[Agreement]:
    """Of prefill, and of decoding."""
    cases = read_goldens(DATA / "smollm2-135m-instruct.jsonl")
    with cuda_runner(str(directory), kv_blocks=2048, max_step_tokens=4096, **formats) as runner:
        return [_in_chunks(runner, cases), _step_by_step(runner, cases)]


def _in_chunks(runner: CudaRunner, cases: Sequence[Golden]) -> Agreement:
    """Each case's prompt and output as one prompt."""
    rows: list[torch.Tensor] = []
    for key, case in enumerate(cases):
        line = _line(key, [*case.prompt, *case.output[:-1]], first_block=0)
        rows.append(all_logits(runner, [line.part(len(line.tokens))])[len(case.prompt) - 1 :])
        runner.forget(key)
    return _agreement(torch.cat(rows), [token for case in cases for token in case.output])


def _step_by_step(runner: CudaRunner, cases: Sequence[Golden]) -> Agreement:
    """All cases in one batch, one token of each a step; a case leaves when its output ends."""
    rows: list[torch.Tensor] = []
    wanted: list[int] = []
    running: list[tuple[Line, Golden]] = []
    block = 0
    for key, case in enumerate(cases):
        line = _line(key, list(case.prompt), block)
        block += len(line.blocks)
        prefill(runner, [line])
        _force(runner, line, case.output[0])
        running.append((line, case))
    step = 1
    while running := [(line, case) for line, case in running if len(case.output) > step]:
        rows.append(decode_logits(runner, [line for line, _ in running])[1].float())
        for line, case in running:
            _force(runner, line, case.output[step])
            wanted.append(case.output[step])
        step += 1
    return _agreement(torch.cat(rows), wanted)


def _force(runner: CudaRunner, line: Line, token_id: int) -> None:
    """Put ``token_id`` in the place of the token drawn last, also on the device, which would take its own."""
    line.tokens[-1] = token_id
    runner.forget(line.key)


def _line(key: int, tokens: list[int], first_block: int) -> Line:
    """With blocks for 64 tokens more."""
    return Line(key, tokens, list(range(first_block, first_block + (len(tokens) + 64) // BLOCK + 1)))


def _agreement(logits: torch.Tensor, wanted: Sequence[int]) -> Agreement:
    golden = torch.tensor(wanted, device=logits.device)
    same = (logits.argmax(dim=-1) == golden).float().mean()
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, golden[:, None])
    return Agreement(len(wanted), round(float(same), 4), round(float(logprobs.mean()), 4))
