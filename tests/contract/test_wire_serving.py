"""What every server of ours does, whatever it serves: tokens, health, drain, TLS, metrics."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.core.errors import ConfigError, Draining, Overloaded, PeerUnavailable, Unauthenticated
from baton.core.telemetry import SilentMeter, log_fields
from baton.core.types import DecodeRequest, KvChunk, Plan, PrefillRequest, TokenChunk
from baton.rpc.channels import ClientSecurity, ClientTls, open_channel
from baton.rpc.kvreceiver import KvReceiverClient, kvreceiver_service
from baton.rpc.planner import PlannerClient, planner_service
from baton.rpc.prefill import PrefillClient, prefill_service
from baton.rpc.serving import ServerPolicy, ServerTls, serve
from baton.rpc.wire.planner import query_to_wire
from tests.contract.wire_doubles import (
    GARBAGE,
    PLAN,
    QUERY,
    TICKET,
    TOKENS,
    Script,
    ScriptedDecode,
    ScriptedPlanner,
    ScriptedPrefill,
    ScriptedReceiver,
    answers,
    blocks,
    link_to,
    nothing,
    raises,
    raw,
    served_decode,
    soon,
    until,
    wire,
)

# --- who may call -----------------------------------------------------------------------------------------------------


def test_callers_without_the_shared_token_are_refused_but_health_is_open() -> None:
    async def run() -> None:
        domain = ScriptedPlanner(answers(PLAN))
        services = (planner_service(domain), served_decode(ScriptedDecode(nothing)))
        policy = ServerPolicy(token="s3cret", drain=0)
        async with wire(*services, policy=policy, security=ClientSecurity("s3cret")) as (server, peer):
            assert await soon(PlannerClient(peer).plan(QUERY)) == PLAN
            for token in ("", "wrong", "s3cre", "s3crets"):
                stranger = open_channel(server.address, ClientSecurity(token))
                with pytest.raises(Unauthenticated):
                    await soon(PlannerClient(stranger).plan(QUERY))
                check = health_pb2_grpc.HealthStub(stranger.channel).Check(health_pb2.HealthCheckRequest())
                assert (await soon(check)).status == health_pb2.HealthCheckResponse.SERVING
                async with link_to(server.address, token=token) as link:
                    with pytest.raises(PeerUnavailable, match="token"):
                        await soon(anext(aiter(link.generate(DecodeRequest(TOKENS)))))
                await stranger.close()
        assert len(domain.script.seen) == 1

    asyncio.run(run())


def test_a_secret_is_not_shown() -> None:
    async def run() -> None:
        peer = open_channel("127.0.0.1:1", ClientSecurity("s3cret"))
        assert "s3cret" not in repr((ServerPolicy(token="s3cret"), ClientSecurity("s3cret"), peer))
        await peer.close()

    asyncio.run(run())


# --- identity, health, reflection -------------------------------------------------------------------------------------


def test_the_request_id_comes_back_whatever_the_call_ended_with() -> None:
    async def run() -> None:
        for script in (answers(PLAN), raises(Overloaded("full")), raises(ZeroDivisionError())):
            async with wire(planner_service(ScriptedPlanner(script))) as (_, peer):
                body = query_to_wire(QUERY).SerializeToString()
                call: Any = raw(peer.channel, "/baton.v1.PlannerService/Plan")(
                    body, metadata=(("x-request-id", "req-77"),)
                )
                assert dict(await soon(call.trailing_metadata()))["x-request-id"] == "req-77"
                call = raw(peer.channel, "/baton.v1.PlannerService/Plan")(body)
                assert dict(await soon(call.trailing_metadata()))["x-request-id"].startswith("req-")

    asyncio.run(run())


def test_log_lines_name_the_request_that_they_are_about() -> None:
    said: list[Mapping[str, str]] = []

    async def act() -> Plan:
        said.append(log_fields())
        return PLAN

    async def chunks(_: DecodeRequest) -> AsyncIterator[TokenChunk]:
        said.append(log_fields())
        yield TokenChunk((1,))

    async def run() -> None:
        planner = ScriptedPlanner(Script(act))
        async with (
            wire(planner_service(planner), served_decode(ScriptedDecode(chunks))) as (server, peer),
            link_to(server.address) as link,
        ):
            await soon(PlannerClient(peer).plan(QUERY))
            for request_id in ("req-8", "req-9"):
                tokens = replace(TOKENS, request_id=request_id, tenant="acme")
                assert [chunk async for chunk in link.generate(DecodeRequest(tokens))]

    asyncio.run(run())
    assert [fields["request_id"] for fields in said] == ["req-1", "req-8", "req-9"]
    assert [fields.get("tenant") for fields in said] == [None, "acme", "acme"]
    assert log_fields() == {}


def test_health_tells_readiness_by_service_and_liveness_for_the_process() -> None:
    async def run() -> None:
        async with wire(planner_service(ScriptedPlanner(blocks()))) as (server, peer):
            stub = health_pb2_grpc.HealthStub(peer.channel)

            async def status(service: str) -> int:
                return (await soon(stub.Check(health_pb2.HealthCheckRequest(service=service)))).status

            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            assert await status("baton.v1.PlannerService") == serving
            await server.set_serving(False)
            assert await status("baton.v1.PlannerService") == not_serving
            assert await status("") == serving

    asyncio.run(run())


def test_reflection_lists_what_is_served() -> None:
    async def run() -> None:
        async with wire(planner_service(ScriptedPlanner(blocks()))) as (_, peer):

            async def question() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
                yield reflection_pb2.ServerReflectionRequest(list_services="")

            stub: Any = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
            answer = await soon(stub.ServerReflectionInfo(question()).read())
        names = {service.name for service in answer.list_services_response.service}
        assert {"baton.v1.PlannerService", "grpc.health.v1.Health"} <= names

    asyncio.run(run())


def test_channelz_is_served_when_asked_for() -> None:
    async def run() -> None:
        method = "/grpc.channelz.v1.Channelz/GetServers"
        async with wire(policy=ServerPolicy(drain=0, channelz=True)) as (_, peer):
            assert await soon(raw(peer.channel, method)(b""))
        async with wire() as (_, peer):
            with pytest.raises(grpc.aio.AioRpcError):
                await soon(raw(peer.channel, method)(b""))

    asyncio.run(run())


# --- drain ------------------------------------------------------------------------------------------------------------


def test_a_drain_refuses_new_requests_and_waits_for_running_ones() -> None:
    async def run() -> None:
        finish = asyncio.Event()

        async def act() -> Plan:
            await finish.wait()
            return PLAN

        domain = ScriptedPlanner(answers(None))
        domain.script.act = act
        async with wire(planner_service(domain)) as (server, peer):
            client = PlannerClient(peer)
            running = asyncio.create_task(client.plan(QUERY))
            await until(lambda: server.in_flight == 1)
            drain = asyncio.create_task(server.drain(20))
            await until(lambda: server._calls._draining)
            with pytest.raises(Draining, match="draining"):
                await soon(client.plan(QUERY))
            assert not drain.done()
            finish.set()
            assert await soon(running) == PLAN
            assert await soon(drain)
            assert server.in_flight == 0

    asyncio.run(run())


def test_a_draining_worker_still_receives_the_kv_of_its_running_requests() -> None:
    async def run() -> None:
        domain = ScriptedReceiver(answers(None))
        async with wire(kvreceiver_service(domain), prefill_service(ScriptedPrefill(blocks()))) as (server, peer):
            assert await soon(server.drain(5))
            await soon(KvReceiverClient(peer).offer(KvChunk(TICKET, 0, 1, b"x")))
            with pytest.raises(Overloaded):
                await soon(PrefillClient(peer).prefill(PrefillRequest(TOKENS, TICKET)))

    asyncio.run(run())


def test_a_drain_is_bounded() -> None:
    async def run() -> None:
        domain = ScriptedPlanner(blocks())
        async with wire(planner_service(domain)) as (server, _):
            peer = open_channel(server.address)
            running = asyncio.create_task(PlannerClient(peer).plan(QUERY))
            await until(lambda: server.in_flight == 1)
            assert not await soon(server.drain(0.05))
        with pytest.raises(PeerUnavailable):
            await soon(running)
        await peer.close()
        assert domain.script.cancelled.is_set()

    asyncio.run(run())


# --- binding and TLS --------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    async def run() -> None:
        async with wire() as (server, _):
            with pytest.raises(ConfigError, match=server.address):
                async with serve([], server.address, SilentMeter()):
                    pass

    asyncio.run(run())


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a pair for the server and for the client that it signed; made by the openssl command."""
    folder = tmp_path_factory.mktemp("pems")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *key[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


def test_tls_with_client_certificates(pems: Path) -> None:
    server_tls = ServerTls(pems / "server.pem", pems / "server.key", client_ca=pems / "ca.pem")
    with_pair = ClientTls(pems / "ca.pem", pems / "client.pem", pems / "client.key")

    async def run() -> None:
        services = (planner_service(ScriptedPlanner(answers(PLAN))),)
        policy = ServerPolicy(tls=server_tls, drain=0)
        async with wire(*services, policy=policy, security=ClientSecurity(tls=with_pair)) as (server, peer):
            assert await soon(PlannerClient(peer).plan(QUERY)) == PLAN
            for tls in (None, ClientTls(pems / "ca.pem")):
                stranger = open_channel(server.address, ClientSecurity(tls=tls))
                with pytest.raises(PeerUnavailable):
                    await soon(PlannerClient(stranger).plan(QUERY))
                await stranger.close()

    asyncio.run(run())


def test_bad_tls_files_are_named(pems: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    for certificate, key in ((tmp_path / "absent.pem", pems / "server.key"), (broken, pems / "server.key")):
        with pytest.raises(ConfigError, match=certificate.name):
            ServerTls(certificate, key).credentials()
    with pytest.raises(ConfigError, match=r"client\.key"):  # a pair that does not belong together
        ServerTls(pems / "server.pem", pems / "client.key").credentials()
    with pytest.raises(ConfigError, match=r"broken\.pem"):
        ClientTls(broken).credentials()
    with pytest.raises(ConfigError, match="together"):
        ClientTls(pems / "ca.pem", pems / "client.pem").credentials()


# --- metrics ----------------------------------------------------------------------------------------------------------


class Recorder(SilentMeter):
    """Keeps what is counted and observed, by instrument and labels."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], float] = {}

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Recorder._Instrument:
        return self._Instrument(self, name)

    def histogram(
        self, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] | None = None
    ) -> Recorder._Instrument:
        return self._Instrument(self, name)

    class _Instrument:
        def __init__(self, recorder: Recorder, name: str) -> None:
            self._recorder = recorder
            self._name = name

        def add(self, amount: float = 1.0, **labels: str) -> None:
            key = (self._name, *labels.values())
            self._recorder.counts[key] = self._recorder.counts.get(key, 0) + amount

        def observe(self, value: float, **labels: str) -> None:
            self.add(1, **labels)


def test_requests_durations_and_errors_are_counted_by_method_and_reason() -> None:
    async def run() -> None:
        meter = Recorder()
        script = raises(Overloaded("full"))
        service = planner_service(ScriptedPlanner(script))
        async with serve([service], "127.0.0.1:0", meter, ServerPolicy(drain=0)) as server:
            peer = open_channel(server.address)
            with pytest.raises(Overloaded):
                await soon(PlannerClient(peer).plan(QUERY))
            script.act = answers(PLAN).act
            await soon(PlannerClient(peer).plan(QUERY))
            with pytest.raises(grpc.aio.AioRpcError):
                await soon(raw(peer.channel, "/baton.v1.PlannerService/Plan")(GARBAGE))
            with pytest.raises(grpc.aio.AioRpcError):
                await soon(raw(peer.channel, "/baton.v1.PlannerService/" + "x" * 100)(b""))
            await peer.close()
        assert meter.counts == {
            ("rpc_requests", "PlannerService/Plan"): 3,
            ("rpc_duration_seconds", "PlannerService/Plan"): 3,
            ("rpc_errors", "PlannerService/Plan", "OVERLOADED"): 1,
            ("rpc_errors", "PlannerService/Plan", "INVALID_REQUEST"): 1,
        }

    asyncio.run(run())
