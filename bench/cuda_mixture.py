"""One layer of experts on the GPU, alone: microseconds with bf16 weights and with e4m3, by rows.

``python -m bench.cuda_mixture [--models qwen3-30b-a3b,mixtral-8x7b]`` prints a table; the layer is captured, and three
copies of its weights take turns, more than the L2 cache holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from baton.engine.cuda.build import build
from baton.engine.cuda.fp8_weights import quantize_channels
from baton.engine.cuda.kernels import Kernels
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.mixture import ExpertWeights, Mixture
from baton.engine.cuda.products import Linear
from baton.engine.spec import DecoderSpec, MoeSpec
from baton.engine.weights.source import load_spec
from bench.captured import median_time

ROWS = (1, 8, 64, 256, 2048, 8192)
COPIES = 3
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_mixture")
    parser.add_argument("--models", default="qwen3-30b-a3b,mixtral-8x7b", help="presets, separated by commas")
    options = parser.parse_args()
    kernels = Kernels(CudaLibrary(build()), DEVICE)
    for name in options.models.split(","):
        spec = load_spec(f"random:{name}")
        if spec.moe is None:
            parser.error(f"--models: must be mixtures of experts, got {name}")
        measure(name, spec, spec.moe, Mixture(spec.moe, kernels, DEVICE))


@torch.inference_mode()
def measure(name: str, spec: DecoderSpec, moe: MoeSpec, mixture: Mixture) -> None:
    print(f"{name}: {moe.experts} experts of {moe.ffn_size}, {moe.top_k} a row, hidden {spec.hidden_size}: us a layer")
    plain = [_experts(spec, moe) for _ in range(COPIES)]
    rounded = [_rounded(weights) for weights in plain]
    for rows in ROWS:
        bf16, e4m3 = (_time(mixture, layers, rows, spec.hidden_size) for layers in (plain, rounded))
        print(f"  {rows} rows: bf16 {bf16:.1f}, e4m3 {e4m3:.1f}")


def _time(mixture: Mixture, layers: Sequence[ExpertWeights], rows: int, hidden: int) -> float:
    x = torch.randn(rows, hidden, device=DEVICE).to(torch.bfloat16)
    out = torch.empty_like(x)
    return median_time(lambda index: mixture.forward(x, layers[index % COPIES], out), COPIES)


def _experts(spec: DecoderSpec, moe: MoeSpec) -> ExpertWeights:
    hidden, ffn = spec.hidden_size, moe.ffn_size

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=shape[-1] ** -0.5)

    gate_up, down = drawn(moe.experts, 2 * ffn, hidden), drawn(moe.experts, hidden, ffn)
    return ExpertWeights(drawn(moe.experts, hidden), Linear(gate_up), Linear(down))


def _rounded(weights: ExpertWeights) -> ExpertWeights:
    products = (quantize_channels(linear.weight) for linear in (weights.gate_up, weights.down))
    return ExpertWeights(weights.router, *(Linear(values, scale=scale) for values, scale in products))


if __name__ == "__main__":
    main()
