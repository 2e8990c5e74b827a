"""From configuration to a runner that is ready to compute: spec, weights, decoder, KV pool."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.core.errors import ConfigError, ModelError
from baton.core.types import KvFormat, ModelCard, Module
from baton.engine import kvcache
from baton.engine.config import EngineConfig
from baton.engine.decoder import Decoder, Weights
from baton.engine.native.build import NativeUnavailable
from baton.engine.native.decoder import NativeDecoder
from baton.engine.runner import Runner
from baton.engine.spec import DecoderSpec
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.torch_runner import TorchRunner
from baton.engine.weights.load import open_weights
from baton.engine.weights.source import RANDOM_PREFIX, load_spec, weights_hash

if TYPE_CHECKING:
    from baton.engine.cuda.copies import CudaCopies

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_runner(config: EngineConfig) -> Runner:
    """Load ``config.model``, a Hugging Face directory or ``random:CONFIG``.

    Raises ModelError when the model cannot be loaded, ConfigError when it or the KV pool does not fit the memory, and
    CudaUnavailable when ``config.device`` is cuda and there is no GPU, or what its kernels need is missing.
    """
    if config.model.endswith(".gguf"):
        raise ModelError(f"{config.model}: an engine loads directories; run `baton model convert {config.model}` first")
    dtype, device = DTYPES[config.dtype], torch.device(config.device)
    torch.set_num_threads(config.threads)
    spec = load_spec(config.model)
    layout = KvFormat(_kv_dtype(config), config.block_size, spec.layers, spec.kv_heads, spec.head_dim)
    card = _card(config, spec, layout)
    if config.device == "cuda":
        return _on_gpu(config, spec, card, dtype)
    with open_weights(config.model, spec, dtype, device, config.seed) as weights:
        decoder = _decoder(config, spec, weights, dtype)
    pool, memory = kvcache.allocate_shared(spec, _blocks(config, layout), dtype, layout)
    return TorchRunner(decoder, pool, card, memory)


def _on_gpu(config: EngineConfig, spec: DecoderSpec, card: ModelCard, dtype: torch.dtype) -> Runner:
    """By the engine's own kernels, or by the reference in torch. Imported late: CPU machines need none of it."""
    from baton.engine.cuda.device import gpu, hopper

    device = gpu()
    with open_weights(config.model, spec, dtype, device, config.seed) as weights:
        if config.backend == "torch":
            return _reference_on_gpu(config, spec, weights, card, device)
        from baton.engine.cuda.load import build_cuda_runner

        hopper(device)
        return build_cuda_runner(config, spec, weights, card, device)


def _reference_on_gpu(
    config: EngineConfig, spec: DecoderSpec, weights: Weights, card: ModelCard, device: torch.device
) -> Runner:
    """It allocates as it goes, so its pool leaves half of the memory to it unless the configuration says otherwise."""
    from baton.engine.cuda.memory import fixed_blocks, refused_when_full, usable_bytes

    dtype = DTYPES[config.dtype]
    with refused_when_full(config.model, device):
        decoder = TorchDecoder(spec, weights, dtype)
        torch.cuda.empty_cache()
        half = usable_bytes(config.gpu_memory_share, device) // 2
        blocks = fixed_blocks(config, card.format) or max(1, half // card.format.block_bytes)
        pool = kvcache.allocate_pool(spec, blocks, config.block_size, dtype, device)
        return TorchRunner(decoder, pool, card, copies=_copies(config, pool, card.format))


def _copies(config: EngineConfig, pool: torch.Tensor, layout: KvFormat) -> CudaCopies | None:
    """What hands blocks over between GPUs, where its kernels can be compiled; the reference needs no others."""
    from baton.engine.cuda.build import COPYING, CudaUnavailable, build
    from baton.engine.cuda.copies import device_copies
    from baton.engine.cuda.library import CudaLibrary

    cache = Path(config.kernel_cache).expanduser() / "cuda"
    try:
        library = CudaLibrary(build(cache, names=COPYING))
    except CudaUnavailable as error:
        log.info("KV is not copied between GPUs", extra={"error": error.message})
        return None
    return device_copies(library, pool, layout, [torch.cuda.current_stream(pool.device)])


def _decoder(config: EngineConfig, spec: DecoderSpec, weights: Weights, dtype: torch.dtype) -> Decoder:
    if config.backend == "torch":
        return TorchDecoder(spec, weights, dtype)
    try:
        decoder = NativeDecoder(spec, weights, dtype, config.threads)
    except NativeUnavailable as error:
        if config.backend == "native":
            raise
        log.warning("native kernels are unavailable, using torch", extra={"error": error.message})
        return TorchDecoder(spec, weights, dtype)
    log.info("native kernels in use", extra={"lanes": decoder.lanes})
    return decoder


def _kv_dtype(config: EngineConfig) -> str:
    """torch's name of the pool's element type."""
    return "float8_e4m3fn" if config.kv_format == "fp8" else config.dtype


def _blocks(config: EngineConfig, layout: KvFormat) -> int:
    blocks = config.kv_blocks or (config.kv_cache_mb << 20) // layout.block_bytes
    if blocks < 1:
        needed = -(-layout.block_bytes // (1 << 20))
        raise ConfigError(f"engine.kv_cache_mb must hold at least one block ({needed} MB), got {config.kv_cache_mb}")
    return blocks


def _card(config: EngineConfig, spec: DecoderSpec, layout: KvFormat) -> ModelCard:
    return ModelCard(
        model=config.served_name or Path(config.model.removeprefix(RANDOM_PREFIX)).stem,
        architecture=spec.architecture,
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        weights_hash=weights_hash(config.model, config.seed, config.weight_format),
        format=layout,
        eos_token_ids=spec.eos_token_ids,
        modules=(Module.ATTENTION_WINDOW,) if config.device == "cpu" or config.backend == "torch" else (),
    )
