"""Whole hand-overs between two workers with a GPU each, or on one: real engines, fronts, and gRPC between them.

The model is thin, but its KV has the wanted shape; its prompts are computed before. What is timed is the hand-over of
all blocks, from the digest of the first one to the last one's confirmation, the decode worker being idle.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from baton.core.types import KvFormat
from baton.engine.client import spawn_engine
from baton.engine.config import EngineConfig
from baton.engine.weights.source import RANDOM_PREFIX
from bench.gpu_processes import visible
from bench.prefill_runs import ComputedRun, computed
from bench.timed_way import Stopwatch, TimedWay
from bench.transfer import senders_of
from bench.transfer_peer import Peer, peer
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.sender import KvSender

WARM_UPS = 3
SPARE_BLOCKS = 64


async def hand_overs(
    layout: KvFormat,
    prompts: Sequence[int],
    gpus: tuple[int, int],
    transports: Sequence[str],
    repeats: int,
    checksums: str,
) -> dict[str, Any]:
    """Medians by transport and prompt, from the first GPU to the second. ``checksums``: as ``kvtransfer.checksums``."""
    kvtransfer = KvTransferConfig(transports=(*transports, "tcp"), acknowledge_seconds=60.0, checksums=checksums)
    async with AsyncExitStack() as stack:
        model = stack.enter_context(_thin_model(layout, max(prompts) + 1))
        config = EngineConfig(
            model=model,
            dtype=layout.dtype,
            device="cuda",
            backend="torch",
            block_size=layout.block_size,
            max_step_tokens=8192,
            kv_blocks=max(prompts) // layout.block_size + SPARE_BLOCKS,
        )
        with visible_gpus(*gpus):
            engine = await stack.enter_async_context(spawn_engine(config))
        other = await stack.enter_async_context(peer(config, kvtransfer, gpu_environment(gpus[1], gpus[0])))
        watch = Stopwatch()
        senders = senders_of(stack, engine, other, kvtransfer, lambda way: TimedWay(way, watch))
        rows: list[dict[str, Any]] = []
        for tokens in prompts:
            async with computed(engine, tokens) as run:
                for name in (name for name in transports if name in senders):
                    row = await _measured(name, senders[name], other, run, tokens, layout, repeats)
                    rows.append(row | {"parts_ms": watch.medians()})
    return {"gpus": gpus, "transports": list(senders), "checksums": checksums, "rows": rows}


async def _measured(
    name: str, sender: KvSender, other: Peer, run: ComputedRun, tokens: int, layout: KvFormat, repeats: int
) -> dict[str, Any]:
    size = tokens * (layout.block_bytes // layout.block_size)
    taken: list[float] = []
    for turn in range(WARM_UPS + repeats):
        async with _ticket(sender, other, tokens) as ticket:
            began = time.perf_counter()
            shipped = await sender.ship(ticket, run, 0)
            if turn >= WARM_UPS:
                taken.append(1000 * (time.perf_counter() - began))
        assert shipped == size
    median = statistics.median(taken)
    return {
        "transport": name,
        "tokens": tokens,
        "bytes": size,
        "median_ms": round(median, 3),
        "best_ms": round(min(taken), 3),
        "worst_ms": round(max(taken), 3),
        "gb_s": round(size / median / 1e6, 1),
    }


@asynccontextmanager
async def _ticket(sender: KvSender, other: Peer, tokens: int) -> AsyncIterator[Any]:
    async with other.ticket(tokens) as ticket:
        await sender.connect(ticket)
        yield ticket


@contextmanager
def _thin_model(layout: KvFormat, context: int) -> Iterator[str]:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layout.layers,
        "num_attention_heads": layout.kv_heads,
        "num_key_value_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "vocab_size": 512,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        path = Path(directory) / "thin.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        yield f"{RANDOM_PREFIX}{path}"


def gpu_environment(gpu: int, *others: int) -> Mapping[str, str]:
    """Of a process on ``gpu`` that maps memory of the others."""
    return {"CUDA_VISIBLE_DEVICES": visible(gpu, *others), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@contextmanager
def visible_gpus(gpu: int, *others: int) -> Iterator[None]:
    """For processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(gpu_environment(gpu, *others))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
