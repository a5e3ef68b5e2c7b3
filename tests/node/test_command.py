"""`meshnet node` as a process: what it refuses to start with, and how it starts, drains and ends."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from support.mesh import Mesh, Process, run_mesh
from support.metrics import documented, shown
from support.smollm2 import smollm2_path

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A tracker, and one node with the whole model."""
    with run_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        mesh.start_tracker()
        mesh.start_node("whole", "0-29", "--threads", "1", "--slots", "3", "--ctx", "512")
        mesh.wait_ready()
        yield mesh


def refuse(folder: Path, *arguments: str, token: str = "none", timeout: float = 60.0) -> str:
    """Runs a node that must not start; returns what it says. It ends by itself, with a code."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "meshnet",
            "node",
            "--port",
            "0",
            "--grpc-port",
            "0",
            "--data",
            str(folder / "data"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "MESHNET_JOIN_TOKEN": token},
    )
    said = ended.stderr.strip().splitlines()
    assert ended.returncode not in (0, -signal.SIGKILL), ended.stdout
    assert "Traceback" not in ended.stderr
    return said[-1] if said else ""


def model(*layers: str) -> list[str]:
    return ["--tracker", NOWHERE, "--model", str(smollm2_path()), "--layers", ",".join(layers)]


def test_an_unknown_model(tmp_path: Path) -> None:
    said = refuse(tmp_path, "--tracker", NOWHERE, "--model", "no-such-model", "--layers", "0-3")
    assert "no-such-model" in said


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is a text\n" * 100)
    assert "GGUF" in refuse(tmp_path, "--tracker", NOWHERE, "--model", str(path), "--layers", "0-3")


def test_a_truncated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(smollm2_path().read_bytes()[: 20 << 20])
    said = refuse(tmp_path, "--tracker", NOWHERE, "--model", str(path), "--layers", "0-3")
    assert "half.gguf" in said
    assert "end" in said or "truncated" in said


@pytest.mark.parametrize("layers", ["0-30", "40-50"])
def test_layers_outside_the_model(tmp_path: Path, layers: str) -> None:
    said = refuse(tmp_path, *model(layers))
    assert layers in said
    assert "0-29" in said


@pytest.mark.parametrize("layers", ["x", "5-1", "1-", "-3"])
def test_layers_that_are_none(tmp_path: Path, layers: str) -> None:
    assert "--layers" in refuse(
        tmp_path, "--tracker", NOWHERE, "--model", str(smollm2_path()), f"--layers={layers}"
    )


def test_more_than_fits_the_memory(tmp_path: Path) -> None:
    """What is needed, what there is, and what of it the replay buffer takes."""
    said = refuse(tmp_path, *model("0-29"), "--memory", "300000000")
    assert "need" in said
    assert "233 MB" in said
    assert "67 MB are set aside by --replay-buffer" in said


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refuse(tmp_path, *model("0-3"), "--port", port)
        said = refuse(tmp_path, *model("0-3"), "--grpc-port", port)
        assert port in said
        assert "--grpc-port" in said


def test_an_unknown_device(tmp_path: Path) -> None:
    assert "quantum" in refuse(tmp_path, *model("0-3"), "--device", "quantum")


def test_cores_that_no_machine_has(tmp_path: Path) -> None:
    said = refuse(tmp_path, *model("0-3"), "--cores", "0-9999999999")
    assert said == "meshnet node: --cores: '0-9999999999' is above 65535"


def test_a_core_that_this_process_may_not_use(tmp_path: Path) -> None:
    last = max(os.sched_getaffinity(0))
    said = refuse(tmp_path, *model("0-3"), "--cores", f"{last},{last + 7}")
    assert said.startswith(
        f"meshnet node: --cores: {last + 7} is not a CPU that this process may use; usable: "
    )


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    said = refuse(tmp_path, *model("0-3"), "--host", "192.0.2.7")
    assert "192.0.2.7" in said
    assert "--host" in said
    assert "another process" not in said


def test_no_tracker_and_no_retry(tmp_path: Path) -> None:
    said = refuse(tmp_path, *model("0-3"), "--no-retry")
    assert "cannot reach the tracker" in said
    assert NOWHERE in said


def test_an_address_that_is_none(tmp_path: Path) -> None:
    said = refuse(tmp_path, "--tracker", "ftp://x", "--model", str(smollm2_path()), "--layers", "0-3")
    assert "http://HOST:PORT" in said


def test_a_tracker_that_is_not_there_is_tried_again(tmp_path: Path) -> None:
    arguments = ["node", *model("0-3"), "--port", "0", "--grpc-port", "0", "--data", str(tmp_path / "n")]
    process = Process([*arguments, "--slots", "1", "--ctx", "256", "--json"], tmp_path / "log")
    try:
        deadline = time.monotonic() + 60
        while process.log.read_text().count("no tracker") < 3:
            assert time.monotonic() < deadline, process.tail()
            time.sleep(0.05)
        assert "next_try_s" in process.log.read_text()
    finally:
        assert process.stop() == 0


def test_a_wrong_join_token(tmp_path: Path, running: Mesh) -> None:
    said = refuse(
        tmp_path,
        "--tracker",
        running.root,
        "--model",
        str(smollm2_path()),
        "--layers",
        "0-3",
        token="mj-wrong",
    )
    assert "token" in said


def test_a_data_folder_belongs_to_one_node(tmp_path: Path, running: Mesh) -> None:
    folder = str(running.folder / "whole")
    said = refuse(tmp_path, *model("0-3"), "--data", folder)
    assert folder in said
    assert "--data" in said


def test_the_ready_line_and_the_open_endpoints(running: Mesh) -> None:
    ready = running.ready["whole"]
    assert set(ready) >= {"node_id", "name", "http_url", "grpc_address", "layers", "pid"}
    assert ready["layers"] == [[0, 29]]
    with httpx.Client(base_url=ready["http_url"]) as client:
        health = client.get("/healthz")
        assert health.status_code == 200
        told = health.json()
        assert told["node_id"] == ready["node_id"]
        assert told["served_layers"] == [[0, 29]]
        assert told["capacity_score"] > 0
        assert told["latency_ms"] > 0
        metrics = client.get("/metrics").text
        assert shown(metrics) == documented(node=True)
        for path in (
            "/v1/chat/completions",
            "/v1/completions",
            "/internal/calls",
            "/internal/tokenize",
            "/internal/calls/x/reroute",
        ):
            for headers in ({}, {"X-Meshnet-Route": "e30.AAAA"}):
                refused = client.post(path, content=b"no JSON", headers=headers)
                assert refused.status_code == 401, path
                assert refused.json()["error"]["message"]
        assert client.get("/v1/models").status_code == 401


def test_the_credential_is_kept_from_others(running: Mesh) -> None:
    path = running.folder / "whole" / "node.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "credential" in path.read_text()


def test_a_node_comes_back_without_a_token_as_the_same_node(running: Mesh) -> None:
    """What it said the first time lets it in again."""
    before = running.ready["whole"]["node_id"]
    assert running.nodes["whole"].stop() == 0
    process = running.start_node(
        "whole", "0-29", "--threads", "1", "--slots", "3", "--ctx", "512", env={"MESHNET_JOIN_TOKEN": ""}
    )
    running.wait_ready("whole")
    assert running.ready["whole"]["node_id"] == before
    assert process.popen.poll() is None


def test_the_tracker_restarts_and_the_node_is_back(running: Mesh) -> None:
    assert running.tracker is not None
    running.tracker.kill()
    time.sleep(1.0)
    running.start_tracker()
    started = time.monotonic()
    running.wait_ready("whole", timeout=30)
    assert time.monotonic() - started < 15.0


def ticketed(mesh: Mesh) -> tuple[str, str]:
    with mesh.client(admin=True) as client:
        answer = client.post("/api/tickets", json={"model": "smollm2"})
        assert answer.status_code == 200, answer.text
        return mesh.ready["whole"]["http_url"], answer.json()["ticket"]


def test_a_client_with_a_ticket_uses_the_node_directly(running: Mesh) -> None:
    url, ticket = ticketed(running)
    with running.client() as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    with httpx.Client(base_url=url, timeout=60) as client:
        whole = client.post("/v1/chat/completions", json=body, headers={"X-Meshnet-Route": ticket})
        assert whole.status_code == 200, whole.text
        text = whole.json()["choices"][0]["message"]["content"]
        assert text
        bearer = {"Authorization": f"Bearer {ticket}"}
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True}, headers=bearer)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["cache-control"] == "no-store"
        assert streamed.headers["x-accel-buffering"] == "no"
        assert streamed.headers["x-request-id"]
        assert client.get("/v1/models", headers=bearer).json()["data"][0]["id"] == name
        assert client.get(f"/v1/models/{name}", headers=bearer).json()["id"] == name
        plain = client.post(
            "/v1/completions",
            json={"model": "SmolLM2", "prompt": "One, two,", "max_tokens": 4, "temperature": 0},
            headers=bearer,
        )
        assert plain.status_code == 200
        wrong = client.post("/v1/completions", json={"model": "other", "prompt": "x"}, headers=bearer)
        assert wrong.status_code == 404
        for refused, status, param in (
            (client.get("/v1/models/other", headers=bearer), 404, "model"),
            (client.get("/v1/chat/completions", headers=bearer), 405, None),
            (client.get("/v1/other", headers=bearer), 404, None),
            (client.post("/v1/chat/completions", json={**body, "n": 0}, headers=bearer), 400, "n"),
        ):
            assert refused.status_code == status
            assert refused.json()["error"]["param"] == param


def test_a_node_without_room_says_so_by_a_status(running: Mesh) -> None:
    """Streamed as well, for nothing was sent yet."""
    url, ticket = ticketed(running)
    with running.client() as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
    asked = {"model": name, "prompt": "Once", "max_tokens": 450, "stream": True, "logit_bias": {"2": -100}}
    headers = {"X-Meshnet-Route": ticket}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client, ExitStack() as open_streams:
        for _ in range(3):  # as many as it has slots
            stream = open_streams.enter_context(client.stream("POST", "/v1/completions", json=asked))
            assert stream.status_code == 200
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 502
        assert answer.headers["content-type"] == "application/json"
        assert "slots" in answer.json()["error"]["message"]


def test_a_node_loads_the_cuts_that_the_mesh_uses(running: Mesh) -> None:
    """Another node's border becomes an entry layer here, without a hand and with nothing held twice."""

    def entries() -> list[int]:
        listed = running.get("/api/nodes")["nodes"]
        (shard,) = next(node for node in listed if node["name"] == "whole")["shards"]
        return list(shard["entry_layers"]) if shard["state"] == "ready" else []

    process = running.start_node("early", "0-11", "--threads", "1", "--slots", "2", "--ctx", "512")
    running.wait_ready("early")
    deadline = time.monotonic() + 60
    while entries() != [0, 12]:
        assert time.monotonic() < deadline, entries()
        time.sleep(0.1)
    running.wait_ready("whole")
    body = {"model": "smollm2-135m-instruct", "prompt": "A, B, C,", "max_tokens": 8, "temperature": 0}
    with running.client(admin=True) as client:
        alone = client.post("/v1/completions", json=body, headers={"X-Meshnet-Nodes": "whole"})
        both = client.post("/v1/completions", json=body, headers={"X-Meshnet-Nodes": "early,whole"})
    assert both.status_code == 200, both.text
    assert both.headers["X-Meshnet-Route"] == "early[0-11]>whole[12-29]"
    assert both.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert process.stop() == 0


def test_a_waiting_node_burns_nothing_and_stays_small(running: Mesh) -> None:
    """Resident memory: the shard, its room for sessions, the replay buffer, and 250 MB at most."""
    process = psutil.Process(running.nodes["whole"].pid)
    before = process.cpu_times()
    time.sleep(5)
    after = process.cpu_times()
    busy = after.user + after.system - before.user - before.system
    assert busy < 3 * 0.05 * 5, f"{busy:.2f} s of 5 s"
    (node,) = (node for node in running.get("/api/nodes")["nodes"] if node["name"] == "whole")
    shard = node["shards"][0]
    room = shard["n_slots"] * 30 * 512 * 2 * 192 * 2  # positions x layers x (key and value of 192 halves)
    weights = smollm2_path().stat().st_size
    assert process.memory_info().rss < weights + room + (64 << 20) + 250_000_000


def test_sigterm_drains_and_a_second_one_ends(running: Mesh) -> None:
    """The running answer ends whole; new calls are not taken; a node that is told twice does not wait."""
    name = "smollm2-135m-instruct"
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "stream": True}
    with (
        running.client() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        running.nodes["whole"].signal(signal.SIGTERM)
        rest = "\n".join(lines)
    assert "[DONE]" in rest
    assert '"error"' not in rest
    assert running.nodes["whole"].stop() == 0
    running.start_node("whole", "0-29", "--threads", "1", "--slots", "3", "--ctx", "512")
    running.wait_ready("whole")
    with (
        running.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "max_tokens": 400}) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        process = running.nodes["whole"]
        process.signal(signal.SIGTERM)
        time.sleep(0.3)
        process.signal(signal.SIGTERM)
        started = time.monotonic()
        process.popen.wait(15)
        assert time.monotonic() - started < 15


def test_a_node_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed; the node notices."""
    script = (
        "import os, subprocess, sys, time\n"
        "env = {**os.environ, 'MESHNET_PARENT_PID': str(os.getpid())}\n"
        "child = subprocess.Popen([sys.executable, '-m', 'meshnet', 'node', *sys.argv[1:]], env=env)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [*model("0-3"), "--port", "0", "--grpc-port", "0", "--data", str(tmp_path / "n"), "--json"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", script, *arguments, "--slots", "1"], stdout=subprocess.PIPE, stderr=log
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        deadline = time.monotonic() + 60
        while "no tracker" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        deadline = time.monotonic() + 15
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the node outlived its parent"
            time.sleep(0.05)
