"""First light: the demo as a user starts it, asked with the OpenAI SDK."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx2 as httpx
import openai
import psutil
import pytest
from support.mesh import Demo, Process, answer_text, chat, run_demo

PROMPTS = (
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Count from one to twenty in words.",
)


def test_ready_line_has_what_it_promises(demo: Demo) -> None:
    assert set(demo.info) >= {
        "base_url",
        "dashboard_url",
        "api_key",
        "admin_key",
        "join_token",
        "tracker_pid",
        "nodes",
    }
    assert [node["layers"] for node in demo.nodes] == [[0, 14], [15, 29]]
    for node in demo.nodes:
        assert psutil.pid_exists(node["pid"])
        assert set(node) >= {"node_id", "layers", "pid", "http_url", "grpc_address"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The whole model on one node: what the split must say as well."""
    folder = tmp_path_factory.mktemp("whole")
    with run_demo(folder, "--cuts", "") as running, running.client() as client:
        assert [node["layers"] for node in running.nodes] == [[0, 29]]
        return {text: answer_text(chat(client, text, max_tokens=64)) for text in PROMPTS}


@pytest.mark.parametrize("text", PROMPTS)
def test_streams_the_whole_models_tokens_over_both_nodes(
    demo: Demo, whole: dict[str, str], text: str
) -> None:
    client = openai.OpenAI(base_url=demo.base_url, api_key=demo.api_key)
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    pieces = [c.choices[0].delta.content or "" for c in raw.parse() if c.choices]
    client.close()
    assert "".join(pieces) == whole[text]
    assert sum(bool(piece) for piece in pieces) > 5
    call = demo.get(f"/api/calls/{raw.headers['x-meshnet-call']}")
    assert [(s["start_layer"], s["end_layer"]) for s in call["stages"]] == [(0, 14), (15, 29)]
    assert {s["node_id"] for s in call["stages"]} == {node["node_id"] for node in demo.nodes}
    assert all(stage["compute_ms"] > 0 for stage in call["stages"])


@pytest.mark.parametrize("stream", [True, False])
def test_every_call_has_its_events(demo: Demo, stream: bool) -> None:
    with demo.client() as client:
        response = chat(client, "Say hello.", stream=stream, max_tokens=24)
    call_id = response.headers["x-meshnet-call"]
    events = [e for e in demo.get("/api/console?since=0")["events"] if e.get("call_id") == call_id]
    names = [event["event"] for event in events]
    for name in ("proxy route selected", "proxy connected", "proxy progress", "proxy complete"):
        assert names.count(name) == 1, names
    assert [e["seq"] for e in events] == sorted({e["seq"] for e in events})
    text = str(events)
    assert "Say hello" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_stops_all_it_started_within_five_seconds(tmp_path: Path, number: int) -> None:
    process = Process(["demo", "--json", "--port", "0", "--cuts", "15"], tmp_path / "demo.log")
    pids: list[int] = []
    try:
        info = process.line()
        pids = [info["tracker_pid"], *(node["pid"] for node in info["nodes"])]
        process.signal(number)
        assert process._finish(15.0) == 0  # 3 x 5 s
    finally:
        if process.popen.poll() is None:
            process.kill()
    assert not [pid for pid in pids if _alive(pid)]


def test_children_end_when_the_demo_is_killed(tmp_path: Path) -> None:
    process = Process(["demo", "--json", "--port", "0"], tmp_path / "demo.log")
    info = process.line()
    pids = [info["tracker_pid"], *(node["pid"] for node in info["nodes"])]
    process.kill()
    deadline = time.monotonic() + 15.0
    while [pid for pid in pids if _alive(pid)] and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if _alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_data_that_is_kept_serves_a_second_start(tmp_path: Path) -> None:
    arguments = ("--cuts", "", "--ctx", "512", "--slots", "1", "--data", str(tmp_path / "kept"))
    calls, keys, nodes = [], [], []
    for _ in range(2):
        with run_demo(tmp_path, *arguments) as running, running.client() as client:
            calls.append(answer_text(chat(client, "Say hello.", max_tokens=8)))
            keys.append({running.api_key, running.info["admin_key"]})
            nodes.append(running.nodes[0]["node_id"])
            models = httpx.get(
                f"{running.base_url}/models", headers={"Authorization": f"Bearer {min(keys[0])}"}
            )
            assert models.status_code == 200
    assert calls[0] == calls[1]
    assert nodes[0] == nodes[1]
    assert not keys[0] & keys[1]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuts", "0"], ["--cuts", "0", "1..29"]),
        (["--cuts", "30"], ["--cuts", "30", "1..29"]),
        (["--cuts", "20,10"], ["--cuts", "upwards"]),
        (["--cuts", "x"], ["--cuts", "'x'"]),
        (["--model", "no-such-model"], ["no-such-model"]),
    ],
)
def test_bad_input_is_one_clear_sentence(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    process = Process(["demo", "--json", "--port", "0", *arguments], tmp_path / "demo.log")
    with pytest.raises(AssertionError, match="ended with 1"):
        process.line()
    message = process.log.read_text().strip().splitlines()[-1]
    for word in words:
        assert word in message
    assert "Traceback" not in process.log.read_text()
    process._finish(5.0)
