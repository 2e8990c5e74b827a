"""Every kind of bad input, through the real gateway or at a real start: a typed error that names field, limit and
value, and a service that goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import gguf
import grpc
import grpc.aio
import numpy as np
import pytest
import torch

from baton.cli.state_dir import StateDir
from baton.client import ChatMessage, Client
from baton.core.errors import BatonError, InvalidRequest, TokenizerMissing, Unauthenticated, UnknownModel
from baton.core.types import FinishReason, GenerateRequest, Sampling, StopRules
from baton.rpc.errors import from_rpc_error
from tests.baton_command import GENEROUS_SECONDS, Baton, all_dead, stack, until
from tests.launched import running_stack
from tests.ports import free_port

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama-gqa-tied"
GOOD = GenerateRequest(prompt_token_ids=(1, 2, 3), max_tokens=3, stop=StopRules(ignore_eos=True), timeout=60)
TEN_MB = 10 * 1024 * 1024


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    with stack(tmp_path_factory.mktemp("stack"), "--kvtransfer", "0", "--set", "engine.kv_blocks=500") as baton:
        yield baton


@asynccontextmanager
async def client_of(baton: Baton, key: str | None = None) -> AsyncIterator[Client]:
    record = baton.record()
    async with Client(record.gateway, record.key if key is None else key) as client:
        yield client


async def serves(client: Client) -> None:
    answer = await client.ask(GOOD)
    assert answer.choices[0].finish is FinishReason.LENGTH
    assert len(answer.choices[0].token_ids) == 3


def ids(*token_ids: int, **fields: object) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=token_ids, **fields)  # type: ignore[arg-type]


def drawn(**fields: float) -> GenerateRequest:
    return ids(1, sampling=Sampling(**fields))  # type: ignore[arg-type]


def said(*messages: tuple[str, str]) -> GenerateRequest:
    return GenerateRequest(messages=tuple(ChatMessage(role, content) for role, content in messages))


REFUSED = {
    "unknown model": (ids(1, model="gpt-5"), UnknownModel, "", "model: must be one of fake, got 'gpt-5'"),
    "empty ids": (ids(), InvalidRequest, "prompt_token_ids", "prompt_token_ids: must not be empty"),
    "empty text": (GenerateRequest(text=""), InvalidRequest, "text", "text: must not be empty"),
    "no messages": (said(), InvalidRequest, "messages", "messages: must hold 1 to 4096 messages, got 0"),
    "no prompt": (GenerateRequest(), InvalidRequest, "prompt", "prompt: must be exactly one of"),
    "negative id": (ids(1, -1), InvalidRequest, "prompt_token_ids[1]", "must be between 0 and 4294967295, got -1"),
    "large id": (ids(1, 2, 512), InvalidRequest, "prompt_token_ids[2]", "must be between 0 and 511, got 512"),
    "huge id": (ids(2**40), InvalidRequest, "prompt_token_ids[0]", f"must be between 0 and 4294967295, got {2**40}"),
    "large stop id": (ids(1, stop=StopRules(stop_token_ids=(512,))), InvalidRequest, "stop_token_ids[0]", "got 512"),
    "max_tokens 0": (ids(1, max_tokens=0), InvalidRequest, "max_tokens", "max_tokens: must be at least 1, got 0"),
    "max_tokens -5": (ids(1, max_tokens=-5), InvalidRequest, "max_tokens", "max_tokens: must be at least 1, got -5"),
    "max_tokens huge": (ids(1, max_tokens=2**31), InvalidRequest, "max_tokens", f"2147483647, got {2**31}"),
    "over the context": (ids(1, 2, max_tokens=8191), InvalidRequest, "max_tokens", "8192 tokens, got 2 + 8191"),
    "long prompt": (ids(*([1] * 9000)), InvalidRequest, "prompt", "8192 tokens of fake, got 9000 tokens"),
    "hot": (drawn(temperature=2.5), InvalidRequest, "temperature", "must be between 0 and 2, got 2.5"),
    "cold": (drawn(temperature=-0.1), InvalidRequest, "temperature", "must be between 0 and 2, got -0.1"),
    "nan": (drawn(temperature=float("nan")), InvalidRequest, "temperature", "must be between 0 and 2, got nan"),
    "top_p 0": (drawn(top_p=0.0), InvalidRequest, "top_p", "must be above 0 and at most 1, got 0.0"),
    "top_p 1.5": (drawn(top_p=1.5), InvalidRequest, "top_p", "must be above 0 and at most 1, got 1.5"),
    "top_k -1": (drawn(top_k=-1), InvalidRequest, "top_k", "must be between 0 and 2147483647, got -1"),
    "seed": (ids(1, seed=-1), InvalidRequest, "seed", "got -1"),
    "n": (ids(1, n=17), InvalidRequest, "n", "n: must be between 1 and 16, got 17"),
    "n 0": (ids(1, n=0), InvalidRequest, "n", "n: must be between 1 and 16, got 0"),
    "timeout 0": (
        ids(1, timeout=0.0),
        InvalidRequest,
        "timeout",
        "must be above 0 and at most 31536000 seconds, got 0.0",
    ),
    "timeout nan": (ids(1, timeout=float("nan")), InvalidRequest, "timeout", "31536000 seconds, got nan"),
    "request_id": (
        ids(1, request_id="\u00e9"),
        InvalidRequest,
        "request_id",
        "visible ASCII characters only, got '\u00e9'",
    ),
    "role": (said(("user", "a"), ("wizard", "b")), InvalidRequest, "messages[1].role", "got 'wizard'"),
    "no role": (said(("", "a")), InvalidRequest, "messages[0].role", "must be one of system, developer, user"),
    "10 MB text": (GenerateRequest(text="a" * TEN_MB), InvalidRequest, "text", f"4194304 bytes, got {TEN_MB} bytes"),
    "10 MB ids": (ids(*([1] * (TEN_MB // 4))), InvalidRequest, "prompt_token_ids", "at most 4194304 bytes"),
    "10 MB chat": (said(("user", "a" * TEN_MB)), InvalidRequest, "messages[0].content", "at most 4194304 bytes"),
    "over the wire's limit": (GenerateRequest(text="a" * (65 << 20)), InvalidRequest, "", "67108864"),
    "text without tokenizer": (GenerateRequest(text="a"), TokenizerMissing, "text", "send prompt_token_ids"),
    "chat without tokenizer": (said(("user", "a")), TokenizerMissing, "messages", "send prompt_token_ids"),
}


@pytest.mark.parametrize(("request_", "kind", "field", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_request_is_named_and_the_next_good_one_is_answered(
    running: Baton, request_: GenerateRequest, kind: type[BatonError], field: str, message: str
) -> None:
    async def main() -> None:
        async with client_of(running) as client:
            with pytest.raises(kind) as caught:
                await client.ask(request_)
            assert message in caught.value.message
            assert len(caught.value.message) < 500
            assert getattr(caught.value, "field", "") == field
            await serves(client)

    asyncio.run(main())


@pytest.mark.parametrize("key", ["wrong", "local.wrong", "", "local.", "local." + "x" * 5000, "l\u00f6cal", "a\nb"])
def test_a_wrong_key_is_refused_without_saying_what_is_wrong(running: Baton, key: str) -> None:
    async def main() -> None:
        async with client_of(running, key) as client:
            with pytest.raises(Unauthenticated) as caught:
                await client.ask(GOOD)
            assert "wrong" not in caught.value.message
        async with client_of(running) as client:
            await serves(client)

    asyncio.run(main())


@pytest.mark.parametrize("method", ["Generate", "Chat"])
def test_bytes_that_are_no_message_are_refused_by_its_name(running: Baton, method: str) -> None:
    async def main() -> None:
        record = running.record()
        async with grpc.aio.insecure_channel(record.gateway) as channel:
            call = channel.unary_stream(f"/baton.v1.GatewayService/{method}", bytes, bytes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(b"\xff\xff\xff", metadata=(("x-api-key", record.key),)):
                    pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{method}Request" in from_rpc_error(caught.value, "gateway").message
        async with client_of(running) as client:
            await serves(client)

    asyncio.run(main())


def test_the_command_tells_a_bad_request_and_ends_with_status_1(running: Baton) -> None:
    shown = running.run("generate", "--prompt-ids", "1,2", "--top-p", "7")
    assert shown.returncode == 1
    assert shown.stderr == "error: INVALID_REQUEST: top_p: must be above 0 and at most 1, got 7.0\n"
    assert shown.stdout == ""


# --- what keeps a stack from starting ---------------------------------------------------------------------------------


def truncated(path: Path) -> list[str]:
    path.mkdir()
    (path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:20_000])
    return ["--model", str(path)]


def corrupt_tokenizer(path: Path) -> list[str]:
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes((TINY / name).read_bytes())
    (path / "tokenizer.json").write_text('{"version":')
    return ["--model", str(path)]


def corrupt_config(path: Path) -> list[str]:
    path.mkdir()
    (path / "config.json").write_bytes((TINY / "config.json").read_bytes()[:100])
    return ["--model", str(path)]


def unsupported_gguf(path: Path) -> list[str]:
    """A llama of one layer with one matrix in a quantisation that nothing here reads."""
    file = path.with_suffix(".gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    vectors, square = ("attn_norm", "ffn_norm"), ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")
    writer.add_tensor("token_embd.weight", np.zeros((32, 256), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    for name in vectors:
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(256, np.float32))
    for name in square:
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((256, 256), np.float32))
    kind = gguf.GGMLQuantizationType.IQ4_NL
    packed = np.zeros((256, 256 // 32 * 18), np.uint8)
    writer.add_tensor("blk.0.ffn_down.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ["--model", str(file)]


def no_memory(path: Path) -> list[str]:
    del path
    return ["--model", str(TINY), "--set", "engine.kv_cache_mb=99999999"]


def no_gpu(path: Path) -> list[str]:
    """With a setting that is refused on a CPU: what follows from the device is known before anything starts."""
    del path
    return ["--model", str(TINY), "--device", "cuda", "--set", "engine.kv_format=fp8"]


def no_redis(path: Path) -> list[str]:
    del path
    return ["--model", "fake", "--set", f"state.url=redis://user:hush@127.0.0.1:{free_port()}/0"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (truncated, "could not start: {tmp}/broken/model.safetensors: truncated or not a safetensors file"),
        (corrupt_tokenizer, "gateway-0 could not start: {tmp}/broken/tokenizer.json: is no valid tokenizer"),
        (corrupt_config, "{tmp}/broken/config.json: "),
        (unsupported_gguf, "tensor blk.0.ffn_down.weight: unsupported type IQ4_NL, supported: BF16, F16"),
        (no_memory, "could not start: engine.kv_cache_mb (or engine.kv_blocks): must fit the "),
        pytest.param(
            no_gpu,
            "could not start: engine.device: cuda needs a GPU and its driver",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        (no_redis, "Redis is away"),
    ],
    ids=["truncated weights", "tokenizer", "config", "type in GGUF", "memory", "GPU", "Redis"],
)
def test_what_keeps_a_stack_from_starting_is_told_in_one_line(
    tmp_path: Path, broken: Callable[[Path], list[str]], message: str
) -> None:
    baton = Baton(tmp_path / "state")
    arguments = broken(tmp_path / "broken")
    up = baton.start("up", *arguments, "--set", "gateway.port=0", "--prefill", "0", "--kvtransfer", "0")
    pids: list[int] = []
    while up.poll() is None:
        with suppress(BatonError):
            pids = baton.pids() or pids
        with suppress(subprocess.TimeoutExpired):
            up.wait(0.1)
    output, _ = up.communicate(timeout=GENEROUS_SECONDS)
    *_, last = output.splitlines()
    assert up.returncode == 2
    assert last.startswith("baton: ")
    assert message.format(tmp=tmp_path) in last
    assert "hush" not in output
    assert all_dead(pids)
    assert StateDir(tmp_path / "state").supervisor() is None


def test_a_port_in_use_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = Baton(tmp_path).run("up", "--model", "fake", "--set", f"gateway.port={port}")
    assert up.returncode == 2
    *_, last = up.stderr.splitlines()
    assert last == f"baton: gateway-0 could not start: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert StateDir(tmp_path).supervisor() is None


# --- Redis absent -----------------------------------------------------------------------------------------------------


def test_a_service_without_redis_runs_and_says_so(tmp_path: Path) -> None:
    http, log = free_port(), tmp_path / "planner.log"
    settings = (f"state.url=redis://127.0.0.1:{free_port()}/0", f"planner.http_port={http}")
    command = [sys.executable, "-m", "services.planner", *(part for s in settings for part in ("--set", s))]
    with log.open("wb") as output:
        planner = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: page(f"http://127.0.0.1:{http}/readyz") == "ready\n", "the planner serves")
        until(lambda: "registry is away, carrying on" in log.read_text(), "the outage is logged")
        planner.send_signal(signal.SIGTERM)
        assert planner.wait(GENEROUS_SECONDS) == 0
    finally:
        planner.kill()
        planner.wait()


def page(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.read().decode()
    except OSError:
        return ""


def test_running_and_new_requests_go_on_when_redis_is_killed() -> None:
    long = GenerateRequest(prompt_token_ids=(1, 2, 3), max_tokens=150, stop=StopRules(ignore_eos=True), timeout=100)

    async def main() -> None:
        async with running_stack("fake", "engine.fake_step_ms=10", "engine.kv_blocks=500") as running:
            wanted = (await running.ask("before", long)).token_ids
            got: list[int] = []
            async with aclosing(running.client.stream(long)) as chunks:
                async for chunk in chunks:
                    got += chunk.token_ids
                    if len(got) == len(chunk.token_ids):
                        assert running.stack.redis_pid is not None
                        os.kill(running.stack.redis_pid, signal.SIGKILL)
            assert got == wanted
            new = await asyncio.gather(*(running.ask(f"after {i}", GOOD) for i in range(8)))
            assert [answer.error for answer in new] == [None] * 8
            assert running.stack.report_ended() == []

    asyncio.run(main())
