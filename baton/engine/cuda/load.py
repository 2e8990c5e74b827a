"""Builds a ``CudaRunner``: kernels, weights, tuned products, buffers, captured graphs and a pool of what is left."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from baton.core.clock import SystemClock
from baton.core.errors import ConfigError
from baton.core.types import ModelCard, Module
from baton.engine import kvcache
from baton.engine.config import EngineConfig
from baton.engine.cuda.attention import (
    DecodeAttention,
    allocate_workspace,
    engine_kernels,
    serves_windows,
    takes_empty_rows,
)
from baton.engine.cuda.attention_shape import AttentionShape, PageTable
from baton.engine.cuda.batch import Batch
from baton.engine.cuda.build import build
from baton.engine.cuda.copies import device_copies
from baton.engine.cuda.decoder import CudaDecoder, DecoderLimits
from baton.engine.cuda.flashinfer_kernels import compile_kernels
from baton.engine.cuda.fp8_weights import check_fp8, load_fp8, scale_name, stored_bytes
from baton.engine.cuda.gemm import TUNED_ROWS, Gemm
from baton.engine.cuda.gemm_tuner import Family
from baton.engine.cuda.gemv import Epilogue
from baton.engine.cuda.graphs import DecodeStep
from baton.engine.cuda.kernels import Kernels, Overlap, check_rows
from baton.engine.cuda.library import CudaLibrary
from baton.engine.cuda.memory import check_weights_fit, fixed_blocks, measured_blocks, refused_when_full
from baton.engine.cuda.mid_rows import MidRows
from baton.engine.cuda.prefill_attention import PrefillAttention
from baton.engine.cuda.runner import CudaRunner, Machinery
from baton.engine.cuda.sampler import DeviceSampler
from baton.engine.cuda.step_arrays import BatchShape, StepLayout, decode_buckets
from baton.engine.cuda.step_buffer import StepBuffer, copy_lookup
from baton.engine.cuda.warm_up import warm_up
from baton.engine.decoder import Weights
from baton.engine.gpu import gpu_energy
from baton.engine.models.registry import by_name
from baton.engine.spec import DecoderSpec

log = logging.getLogger(__name__)

BF16_BYTES = 2
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}  # by the name in a KvFormat
_PROBE_BLOCKS = 1  # of the pool that stands in while memory is measured
_DUMMY_BLOCKS = 1  # behind the pool's last: what padding rows attend to


def build_cuda_runner(
    config: EngineConfig, spec: DecoderSpec, weights: Weights, card: ModelCard, device: torch.device
) -> CudaRunner:
    """Load everything and compute every kind of step once, so that the first request is as fast as the tenth.

    ``weights`` lie on ``device`` when they are read. Raises CudaUnavailable without nvcc or FlashInfer, and ConfigError
    for a model that the kernels do not take or that does not fit.
    """
    check_rows(spec)
    attention = AttentionShape.of(spec, config.block_size, _KV_DTYPES[card.format.dtype])
    if serves_windows(attention):
        card = replace(card, modules=(*card.modules, Module.ATTENTION_WINDOW))
    if config.weight_format == "fp8":
        check_fp8(spec)
    check_weights_fit(_weight_bytes(spec, config), config, device)
    cache = Path(config.kernel_cache).expanduser()
    library = _compiled(attention, cache)
    with ExitStack() as resources, torch.inference_mode(), refused_when_full(config.model, device):
        gemm = resources.enter_context(Gemm(library, device, mid_rows=MidRows(library, device)))
        loaded = load_fp8(weights) if config.weight_format == "fp8" else dict(weights)
        try:
            _tune(gemm, spec, loaded, config, cache / "gemm.json")
        except OSError as error:
            raise ConfigError(f"engine.kernel_cache: must be a folder to write to, got {cache}: {error}") from error
        assembly = _Assembly(config, spec, card, device, library, gemm, loaded)
        blocks = fixed_blocks(config, card.format) or _probe(assembly)
        owned = ExitStack()
        runner = assembly.runner(blocks, owned)
        warm_up(runner, assembly.shape(blocks), spec)
        owned.callback(resources.pop_all().close)
    log.info("engine ready on the GPU", extra={"blocks": blocks, "gpu": torch.cuda.get_device_name(device)})
    return runner


def _compiled(attention: AttentionShape, cache: Path) -> CudaLibrary:
    """All that is compiled, before the weights take their time to be read."""
    # Where FlashInfer, which reads it when it is first imported, keeps the kernels that it compiles.
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(cache))
    library = CudaLibrary(build(cache / "cuda"))
    compile_kernels(engine_kernels(attention))
    return library


def _probe(assembly: _Assembly) -> int:
    """The blocks of the largest pool: what is left after every kind of step has run on a pool of next to nothing."""
    torch.cuda.empty_cache()  # loading and tuning took more than steps do; what steps take for a while must stay
    runner = assembly.runner(_PROBE_BLOCKS, ExitStack())
    try:
        warm_up(runner, assembly.shape(_PROBE_BLOCKS), assembly.spec)
        return measured_blocks(assembly.config, assembly.card.format, assembly.device, _DUMMY_BLOCKS)
    finally:
        runner.close()


class _Assembly:
    """What is made once and serves any pool: the model, its buffers and the sampler."""

    def __init__(
        self,
        config: EngineConfig,
        spec: DecoderSpec,
        card: ModelCard,
        device: torch.device,
        library: CudaLibrary,
        gemm: Gemm,
        weights: Weights,
    ) -> None:
        self.config = config
        self.spec = spec
        self.card = card
        self.device = device
        self._library = library
        rows = _most_rows(config)
        self._results = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._sampler = DeviceSampler(library, spec.vocab_size, rows, device)
        self._decoder = CudaDecoder(
            spec, weights, Kernels(library, device), gemm, DecoderLimits(config.max_step_tokens, rows), self._results[0]
        )
        self._kv_dtype = _KV_DTYPES[card.format.dtype]
        self._attention = AttentionShape.of(spec, config.block_size, self._kv_dtype)
        self._workspace = allocate_workspace(device)

    def shape(self, blocks: int) -> BatchShape:
        """The largest step over a pool of ``blocks`` blocks."""
        rows, size = _most_rows(self.config), self.config.block_size
        return BatchShape(
            rows=rows,
            tokens=self.config.max_step_tokens,
            block_size=size,
            blocks=-(-self.spec.context_length // size),
            dummy_block=blocks,
            buckets=decode_buckets(rows),
            padding_blocks=0 if takes_empty_rows(self._attention) else 1,
            window=self.spec.sliding_window,
        )

    def runner(self, blocks: int, resources: ExitStack) -> CudaRunner:
        """A runner over a new pool, its decode steps captured. It closes ``resources`` when it is closed."""
        shape = self.shape(blocks)
        pool = kvcache.allocate_pool(self.spec, blocks + _DUMMY_BLOCKS, shape.block_size, self._kv_dtype, self.device)
        layout = StepLayout(shape)
        copy = copy_lookup(self._library, self.device)
        buffer, batch = StepBuffer(layout, self.device, copy), Batch(shape)
        arrays = buffer.arrays
        table = PageTable(arrays.row_pages, arrays.block_ids, arrays.row_last_page, arrays.row_hidden)
        steps: dict[int, DecodeStep] = {}
        for bucket in shape.buckets:
            attention = DecodeAttention(self._attention, bucket, pool, table, self._workspace, self._library)
            steps[bucket] = DecodeStep(self._decoder, pool, arrays, attention, self._draw)
        _capture(steps, batch, buffer, layout)
        prefill = PrefillAttention(self._attention, shape.tokens, pool, self._workspace, self._library)
        machinery = Machinery(
            self._decoder,
            steps,
            prefill,
            self._sampler,
            layout,
            buffer,
            batch,
            pool,
            self._results,
            copy,
            lambda blocks, streams: device_copies(self._library, blocks, self.card.format, streams),
            gpu_energy(str(torch.cuda.get_device_properties(pool.device).uuid), SystemClock()),
        )
        return CudaRunner(machinery, self.card, resources)

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """As the last kernel of a decode step."""
        tokens, flags = self._results
        self._sampler.sample(logits, positions, len(positions), tokens, flags, Overlap.YES)


def _capture(steps: Mapping[int, DecodeStep], batch: Batch, buffer: StepBuffer, layout: StepLayout) -> None:
    """Capture a graph for every bucket, the largest first, so that the smaller ones fit into the memory it took."""
    staged = buffer.stage()
    used = batch.pad(max(steps), staged)
    buffer.upload(layout.decode_start, layout.block_ids_start + used)
    memory = torch.cuda.graph_pool_handle()
    for bucket in sorted(steps, reverse=True):
        steps[bucket].plan(staged.row_pages[: bucket + 1])
        torch.cuda.synchronize()
        steps[bucket].capture(memory)


def _tune(gemm: Gemm, spec: DecoderSpec, weights: Weights, config: EngineConfig, cache: Path) -> None:
    """Choose the way of every product. The head's first: the layers' families, named last, decide on fused layers."""
    head = Family((weights["embed.weight" if spec.tied_head else "head.weight"],))
    gemm.tune([head], [rows for rows in TUNED_ROWS if rows <= _most_rows(config)], cache)
    kinds = [("qkv", Epilogue.STORE), ("output", Epilogue.ADD)]
    if spec.moe is None:
        kinds += [("gate_up", Epilogue.SILU_MUL), ("down", Epilogue.ADD)]
    families = [_family(spec, weights, name, epilogue) for name, epilogue in kinds]
    gemm.tune(families, [rows for rows in TUNED_ROWS if rows <= config.max_step_tokens], cache)


def _family(spec: DecoderSpec, weights: Weights, name: str, epilogue: Epilogue) -> Family:
    names = [f"layers.{layer}.{name}.weight" for layer in range(spec.layers)]
    scales = tuple(weights[scale_name(each)] for each in names if scale_name(each) in weights)
    bias = weights.get(f"layers.0.{name}.bias")
    return Family(tuple(weights[each] for each in names), scales, bias, epilogue)


def _most_rows(config: EngineConfig) -> int:
    """Sequences in one step, or sequences and drafts: the scheduler plans no more either."""
    speculating = 0 if config.speculation == "off" else config.speculation_max_rows
    return min(max(config.max_running, speculating), config.max_step_tokens)


def _weight_bytes(spec: DecoderSpec, config: EngineConfig) -> int:
    layouts = by_name(spec.architecture).tensors(spec)
    if config.weight_format == "fp8":
        return sum(stored_bytes(layout.name, layout.shape) for layout in layouts)
    return sum(math.prod(layout.shape) for layout in layouts) * BF16_BYTES
