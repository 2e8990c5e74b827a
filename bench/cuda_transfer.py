"""KV blocks between two processes with a GPU each, or on one GPU: ``python -m bench.cuda_transfer``.

One process owns a pool in the shape of Llama-3-8B (128 KiB a token) and is idle; the other one has mapped it and copies
out of it: by the kernel without and with digests, by the copy engines, for different numbers of CTAs. Beside it NCCL
moves as many bytes between the two. Times are between CUDA events, medians; bytes are counted once. Before anything is
measured, what arrives is compared with what was there, by digests and bit by bit.

With two GPUs or more everything is measured on one and from the first to the second, or between those of ``--pairs``.
``--parts hand-overs`` measures whole hand-overs: real engines, fronts and gRPC between them (see ``bench.transfer``),
with checksums and without any: what they cost where nothing is left out. The file is written after each of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.subcommands import integer
from baton.cli.terminal import say
from baton.core.types import KvFormat
from bench.cuda_transfer_ends import BLOCKS, exporting, importing
from bench.gpu_processes import GpuProcess, gpu_process
from bench.machine import hardware, versions

LLAMA_8B = KvFormat("bfloat16", block_size=16, layers=32, kv_heads=8, head_dim=128)
MIB = 1 << 20
MESSAGE_MIB = (1, 16, 256)
PROMPTS = (512, 2048, 8192)
DEVICE_TRANSPORTS = ("cuda-ipc", "nccl")
CHECKSUMS = ("full", "off")
CTAS = (8, 16, 32, 48, 64, 96, 132, 264, 396)
NCCL_CTAS = (8, 16, 32)
COPIES, HAND_OVERS = "copies", "hand-overs"


@dataclass(frozen=True, slots=True)
class CopyPlan:
    repeats: int
    parts: tuple[str, ...]
    transports: tuple[str, ...]  # of whole hand-overs
    checksums: tuple[str, ...]  # likewise
    pairs: tuple[tuple[int, int], ...]  # of GPUs; empty: one, and the first two where there are two
    output: Path | None
    command: str


def measure_pair(source_gpu: int, target_gpu: int, repeats: int) -> dict[str, Any]:
    """Everything between two processes on these GPUs."""
    with (
        gpu_process(source_gpu, exporting, target_gpu) as source,
        gpu_process(target_gpu, importing, source_gpu) as target,
    ):
        target.ask("map", source.ask("pool"))
        _check(source, target)
        blocks = {f"{mib} MiB": max(1, mib * MIB // LLAMA_8B.block_bytes) for mib in MESSAGE_MIB if mib > 1}
        blocks |= {f"{tokens} tokens": tokens // LLAMA_8B.block_size for tokens in PROMPTS}
        small = {"what": "1 MiB"} | target.ask("copy_small", repeats)
        copies = [{"what": what} | target.ask("copy", count, repeats) for what, count in blocks.items()]
        wanted = PROMPTS[1] // LLAMA_8B.block_size
        return {
            "source_gpu": source_gpu,
            "target_gpu": target_gpu,
            "copies": [small, *copies],
            "ctas": [target.ask("ctas", wanted, ctas, repeats) for ctas in CTAS],
            "source_digest": source.ask("digest", wanted, repeats),
            "checksum_cost": _checksum_cost(copies, source.ask("digest", wanted, repeats)),
            "host": target.ask("host", wanted, repeats),
            "nccl": _nccl(source, target, repeats),
        }


def _check(source: GpuProcess, target: GpuProcess) -> None:
    """What arrives is what was there: digests of both ends, and all bits against the same random numbers."""
    if source.ask("digests") != target.ask("pulled_digests") or not target.ask("is_equal"):
        raise RuntimeError("what was copied is not what was there")


def _checksum_cost(copies: Sequence[dict[str, Any]], digest: dict[str, Any]) -> dict[str, float]:
    """Of 2,048 tokens: how much longer the copy takes for digests in it, and what the sender's add if nothing hides
    them, in percent of the bare copy."""
    [copy] = [each for each in copies if each["what"] == f"{PROMPTS[1]} tokens"]
    bare = copy["kernel_ms"]
    return {
        "light_in_copy_percent": round(100 * (copy["light_ms"] / bare - 1), 2),
        "strong_in_copy_percent": round(100 * (copy["strong_ms"] / bare - 1), 2),
        "light_at_source_percent": round(100 * digest["light_ms"] / bare, 2),
        "strong_at_source_percent": round(100 * digest["strong_ms"] / bare, 2),
    }


def _nccl(source: GpuProcess, target: GpuProcess, repeats: int) -> list[dict[str, Any]] | str:
    """Send and receive of one message, by how many CTAs NCCL may take (0: as it likes)."""
    rows: list[dict[str, Any]] = []
    try:
        for ctas in (0, *NCCL_CTAS):
            invitation = source.ask("nccl_invite")
            for each, rank in ((source, 0), (target, 1)):
                each.begin("nccl_join", invitation, rank, ctas)
            seconds = max(source.answer(), target.answer())
            for mib in MESSAGE_MIB:
                source.begin("nccl_move", mib * MIB, repeats)
                target.begin("nccl_move", mib * MIB, repeats)
                source.answer()
                rows.append({"ctas": ctas, "mib": mib, "join_seconds": seconds} | target.answer())
            for each in (source, target):
                each.begin("nccl_leave")
            source.answer()
            target.answer()
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return rows


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run(plan: CopyPlan) -> dict[str, Any]:
    count = _gpus()
    if not count:
        raise SystemExit("cuda_transfer: needs a GPU")
    pairs = plan.pairs or ((0, 0), (0, 1))[:count]
    document: dict[str, Any] = {
        "command": plan.command,
        "hardware": hardware(),
        "versions": versions(),
        "kv_format": str(LLAMA_8B),
        "pool_blocks": BLOCKS,
    }
    if COPIES in plan.parts:
        document["pairs"] = [measure_pair(source, target, plan.repeats) for source, target in pairs]
    if HAND_OVERS in plan.parts:
        document["hand_overs"] = []
        for pair, checksums in itertools.product(pairs, plan.checksums):
            document["hand_overs"].append(_hand_overs(pair, checksums, plan))
            _write(plan, document)
    return document


def _write(plan: CopyPlan, document: dict[str, Any]) -> None:
    if plan.output is not None:
        plan.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _hand_overs(gpus: tuple[int, int], checksums: str, plan: CopyPlan) -> dict[str, Any]:
    import uvloop

    from bench.cuda_hand_overs import hand_overs  # pulls in gRPC

    found = uvloop.run(hand_overs(LLAMA_8B, PROMPTS, gpus, plan.transports, plan.repeats, checksums))
    for row in found["rows"]:
        say(f"{gpus}, checksums {checksums}: {row['tokens']} tokens by {row['transport']} in {row['median_ms']} ms")
    return found


def plan_of(argv: Sequence[str]) -> CopyPlan:
    parser = argparse.ArgumentParser(prog="bench.cuda_transfer", description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=integer(1, 1000), default=20)
    parser.add_argument("--parts", nargs="+", choices=(COPIES, HAND_OVERS), default=[COPIES])
    parser.add_argument(
        "--transports", nargs="+", choices=DEVICE_TRANSPORTS, default=DEVICE_TRANSPORTS, help="of hand-overs"
    )
    parser.add_argument("--checksums", nargs="+", choices=CHECKSUMS, default=CHECKSUMS, help="of hand-overs")
    parser.add_argument("--pairs", nargs="+", type=_pair, default=(), metavar="GPU,GPU", help="from one to the other")
    parser.add_argument("--output", type=Path, help="JSON file to write; standard output without it")
    arguments = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "bench.cuda_transfer", *argv])
    return CopyPlan(
        arguments.repeats,
        tuple(arguments.parts),
        tuple(arguments.transports),
        tuple(arguments.checksums),
        tuple(arguments.pairs),
        arguments.output,
        command,
    )


def _pair(text: str) -> tuple[int, int]:
    source, target = map(int, text.split(","))
    return source, target


def main() -> int:
    plan = plan_of(sys.argv[1:])
    document = run(plan)
    _write(plan, document)
    if plan.output is None:
        print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
