"""``baton`` over real processes: starting, asking, looking, stopping, and dying."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.state_dir import StateDir, is_alive
from baton.state.embedded import embedded_server
from tests.baton_command import GENEROUS_SECONDS, Baton, all_dead, stack, until

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama-gqa-tied"
FAKE = ("--model", "fake", "--set", "gateway.port=0")
SMALL = ("--prefill", "0", "--kvtransfer", "0", "--set", "engine.kv_blocks=500")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    with stack(tmp_path_factory.mktemp("stack"), "--set", "engine.kv_blocks=500") as baton:
        yield baton


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_an_answer_line_has_the_promised_fields_and_a_seed_repeats_it(running: Baton) -> None:
    asked = (
        "--prompt-ids",
        ",".join(map(str, range(5, 205))),
        "--max-tokens",
        "6",
        "--temperature",
        "1",
        "--seed",
        "7",
    )
    line = running.generate(*asked, "--logprobs", "2")
    assert set(line) - {"index", "kv_bytes"} == {
        *("id", "request_id", "token_ids", "text", "finish_reason", "usage", "logprobs", "prefill", "decode"),
        *("migrations", "ttft_ms", "tpot_ms", "error"),
    }
    assert line["usage"] == {"prompt_tokens": 200, "cached_tokens": 0, "completion_tokens": 6}
    assert line["prefill"] == {"worker": "prefill-0", "mode": "remote"}
    assert line["decode"] == {"worker": "decode-0"}
    assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]
    assert len(line["logprobs"][0]["top"]) == 2
    assert line["error"] is None
    assert running.generate(*asked)["token_ids"] == line["token_ids"]
    plain = running.run("generate", *asked)
    assert plain.stdout == ",".join(map(str, line["token_ids"])) + "\n"


def test_every_rule_of_drawing_has_an_option(running: Baton) -> None:
    asked = ("--prompt-ids", "5,6,7", "--max-tokens", "8", "--ignore-eos")
    plain = running.generate(*asked)["token_ids"]
    stopped = running.generate(*asked, "--stop-token-id", str(plain[2]))
    assert stopped["token_ids"] == plain[: plain.index(plain[2]) + 1] and stopped["finish_reason"] == "stop"
    held_off = running.generate(*asked, "--stop-token-id", str(plain[2]), "--min-tokens", "8")
    assert len(held_off["token_ids"]) == 8
    scored = running.generate(*asked, "--prompt-logprobs", "1")["prompt_logprobs"]
    assert scored[0] is None and [entry["token_id"] for entry in scored[1:]] == [6, 7]


def test_status_lists_every_process_with_its_fields(running: Baton) -> None:
    running.generate("--prompt-ids", "1,2,3", "--max-tokens", "3")
    until(
        lambda: running.status()["decode-0"]["counters"]["tokens_generated"] >= 3, "the heartbeat tells of the answer"
    )
    found = running.status()
    assert list(found) == ["redis-0", "prefill-0", "decode-0", "kvtransfer-0", "planner-0", "gateway-0"]
    for process_id, entry in found.items():
        assert {"service", "role", "id", "epoch", "pid", "address", "state"} <= set(entry)
        assert entry["state"] == "ready", process_id
        assert is_alive(entry["pid"])
        assert entry["role"] == entry["service"] == process_id.rpartition("-")[0]
    for worker in ("prefill-0", "decode-0"):
        blocks = found[worker]["blocks"]
        assert set(blocks) == {"total", "free", "held", "cached"}
        assert blocks["held"] == 0
        assert blocks["free"] + blocks["cached"] == blocks["total"] == 500
        assert {"queued", "running", "tokens_per_second"} <= set(found[worker])
        assert (found[worker]["queued"], found[worker]["running"]) == (0, 0)
    assert {"memory_bytes", "disk_bytes", "hits", "misses"} <= set(found["kvtransfer-0"]["tier"])
    table = running.run("status").stdout.splitlines()
    assert table[0].split()[:3] == ["process", "state", "pid"]
    assert [row.split()[0] for row in table[2:]] == list(found)


def test_a_run_over_cases_writes_each_answer_and_goes_on_where_it_ended(running: Baton, tmp_path: Path) -> None:
    cases, output = tmp_path / "cases.jsonl", tmp_path / "answers.jsonl"
    lines = [{"id": f"c{i}", "prompt_token_ids": [i + 1, 2], "max_tokens": 4} for i in range(12)]
    lines[5]["max_tokens"] = 0
    cases.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ("--input", str(cases), "--output", str(output), "--concurrency", "4")
    first = running.run("generate", *asked)
    assert first.returncode == 1
    assert "answers.jsonl: 100 %" in first.stderr
    assert (
        "1 of 12 cases failed, the last one c5: INVALID_REQUEST: max_tokens: must be at least 1, got 0" in first.stderr
    )
    before = {line["id"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert {name for name, line in before.items() if line["error"] is None} == {f"c{i}" for i in range(12) if i != 5}
    assert before["c5"]["error"]["code"] == "INVALID_ARGUMENT"
    lines[5]["max_tokens"] = 4
    cases.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert running.run("generate", *asked).returncode == 0
    after = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(line["id"] for line in after) == sorted(f"c{i}" for i in range(12))
    assert [line for line in after if line["id"] != "c5"] == [line for name, line in before.items() if name != "c5"]


def test_logs_are_shown_and_followed_until_interrupted(running: Baton) -> None:
    shown = running.run("logs", "planner")
    assert all(json.loads(line)["service"] == "planner-0" for line in shown.stdout.splitlines())
    assert '"message": "started"' in shown.stdout
    assert "planner-0: {" in running.run("logs").stdout
    following = running.start("logs", "supervisor", "-f")
    assert following.stdout is not None
    assert "ready at" in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=GENEROUS_SECONDS)
    assert following.returncode == 130


def test_a_second_stack_on_the_same_directory_is_refused_and_harms_nothing(running: Baton) -> None:
    said = running.log("supervisor")
    for detach in ((), ("--detach",)):
        second = running.run("up", *FAKE, *detach)
        assert second.returncode == 2
        assert f"a stack runs here already (pid {running.record().supervisor_pid})" in second.stderr
    assert running.log("supervisor") == said
    assert running.generate("--prompt-ids", "1")["error"] is None


def test_secrets_show_in_no_command_line_log_or_configuration(running: Baton) -> None:
    record = running.record()
    decode = next(process for process in record.processes if process.id == "decode-0")
    token = environment_of(decode.pid)["BATON_DECODE__SERVICE_TOKEN"]
    secrets = (record.key, record.key.partition(".")[2], token, record.state_password)
    places = [Path(f"/proc/{pid}/cmdline").read_text() for pid in running.pids()]
    places += [path.read_text() for path in (running.path / "logs").iterdir()]
    shown = subprocess.run(
        [sys.executable, "-m", "services.decode", "--print-config"],
        env=environment_of(decode.pid),
        capture_output=True,
        text=True,
        check=True,
        timeout=GENEROUS_SECONDS,
    ).stdout
    assert 'service_token = "***"' in shown
    assert 'password = "***"' in shown
    for secret in secrets:
        assert len(secret) >= 32
        assert not [place for place in (*places, shown) if secret in place]
    for path in running.path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_interrupt_at_the_terminal_reaches_the_launcher_alone_though_all_share_its_session(running: Baton) -> None:
    record = running.record()
    pids = [process.pid for process in record.processes]
    assert len(pids) == 6
    assert os.getpgid(record.supervisor_pid) not in map(os.getpgid, pids)
    assert set(map(os.getsid, pids)) == {os.getsid(record.supervisor_pid)}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_supervisor_ends_every_process(signum: signal.Signals, tmp_path: Path) -> None:
    baton = Baton(tmp_path)
    up = baton.start("up", *FAKE, *SMALL)
    until(lambda: up.poll() is not None or ((found := StateDir(tmp_path).find()) and found.ready), "the stack is ready")
    pids = baton.pids()
    assert len(pids) == 6  # the supervisor, redis, decode and its engine, planner, gateway
    up.send_signal(signum)
    said, _ = up.communicate(timeout=GENEROUS_SECONDS)
    until(lambda: all_dead(pids), "all processes are gone")
    assert up.returncode == (-signum if signum is signal.SIGKILL else 0)
    assert "ready in " in said
    assert StateDir(tmp_path).find() is None


def test_a_signal_while_starting_ends_every_process(tmp_path: Path) -> None:
    baton = Baton(tmp_path)
    up = baton.start("up", *FAKE)
    until(lambda: StateDir(tmp_path).find(), "services are starting")
    pids = baton.pids()
    up.send_signal(signal.SIGTERM)
    up.communicate(timeout=GENEROUS_SECONDS)
    assert up.returncode == 128 + signal.SIGTERM
    assert all_dead(pids)
    assert StateDir(tmp_path).supervisor() is None


def test_an_interrupted_detach_leaves_no_supervisor(tmp_path: Path) -> None:
    baton = Baton(tmp_path)
    up = baton.start("up", "--detach", *FAKE)
    until(lambda: StateDir(tmp_path).find(), "services are starting")
    pids = baton.pids()
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=GENEROUS_SECONDS)
    assert up.returncode == 130
    assert all_dead(pids)


def test_deaths_are_told_not_repaired_and_requests_go_on(tmp_path: Path) -> None:
    with stack(tmp_path, *SMALL, "--decode", "2") as baton:
        before = baton.status()
        os.kill(before["decode-0"]["pid"], signal.SIGKILL)
        until(lambda: "decode-0 ended with status -9; not restarted" in baton.log("supervisor"), "the death is told")
        assert baton.generate("--prompt-ids", "1,2,3")["decode"] == {"worker": "decode-1"}
        os.kill(before["redis-0"]["pid"], signal.SIGKILL)
        until(lambda: "redis-0 ended; not restarted" in baton.log("supervisor"), "the death is told")
        assert baton.generate("--prompt-ids", "1,2,3,4")["decode"] == {"worker": "decode-1"}
        states = {process_id: entry["state"] for process_id, entry in baton.status().items()}
        dead = dict.fromkeys(("redis-0", "decode-0"), "dead")
        assert states == dead | dict.fromkeys(("decode-1", "planner-0", "gateway-0"), "ready")
        pids = baton.pids()
        assert baton.run("down").returncode == 0
        assert all_dead(pids)
        assert "nothing runs under" in baton.run("down").stderr


def test_a_prefill_worker_alone_serves_a_real_model_with_a_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text('[engine]\ndtype = "float32"\nkv_cache_mb = 8\n')
    golden = json.loads((TINY / "golden.jsonl").read_text().splitlines()[0])
    options = ("--prefill", "1", "--decode", "0", "--kvtransfer", "0", "--config", str(config))
    with stack(tmp_path / "state", *options, model=str(TINY)) as baton:
        prompt = ",".join(map(str, golden["prompt_token_ids"]))
        wanted = golden["output_token_ids"]
        line = baton.generate("--prompt-ids", prompt, "--max-tokens", str(len(wanted)), "--ignore-eos")
        assert line["token_ids"] == wanted
        assert line["decode"] == {"worker": "prefill-0"}
        assert baton.status()["prefill-0"]["model"] == "llama-gqa-tied"


def test_the_users_own_redis_and_certificate_are_used(tmp_path: Path) -> None:
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=door"]
    files = ["-keyout", "door.key", "-out", "door.pem", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", *made, *files], cwd=tmp_path, check=True, capture_output=True, timeout=60
    )
    config = tmp_path / "baton.toml"
    with embedded_server("a-password-for-tests") as (url, _):
        config.write_text(
            f'[state]\nurl = "{url}"\npassword = "a-password-for-tests"\nnamespace = "mine"\n'
            f'[gateway]\ndoor_certificate = "{tmp_path}/door.pem"\ndoor_key = "{tmp_path}/door.key"\n'
        )
        with stack(tmp_path / "state", *SMALL, "--config", str(config)) as baton:
            assert set(baton.status()) == {"decode-0", "planner-0", "gateway-0"}
            assert {entry["state"] for entry in baton.status().values()} == {"ready"}
            wanted = baton.generate("--prompt-ids", "1,2,3")["token_ids"]
            record = baton.record()
            elsewhere = Baton(tmp_path / "elsewhere")
            asked = ("--prompt-ids", "1,2,3", "--address", record.gateway, "--key", record.key)
            assert elsewhere.generate(*asked, "--ca", f"{tmp_path}/door.pem")["token_ids"] == wanted
            assert elsewhere.run("generate", *asked).returncode == 1  # without TLS there is no way in
