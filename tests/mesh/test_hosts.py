"""Several hosts: tracker and nodes in network namespaces with addresses of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.mesh import Demo, Process, answer_text, chat
from support.namespaces import hosts, reason_not_allowed

pytestmark = pytest.mark.skipif(reason_not_allowed() is not None, reason=str(reason_not_allowed()))

ASK = """
import json, sys, time, urllib.request
base, key, admin = sys.argv[1:4]
def get(path):
    request = urllib.request.Request(base + path, headers={"Authorization": "Bearer " + admin})
    return json.load(urllib.request.urlopen(request, timeout=10))
deadline = time.time() + 120
while sum(n["ready"] for n in get("/api/nodes")["nodes"]) < 2:
    assert time.time() < deadline, get("/api/nodes")
    time.sleep(0.1)
body = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0, "max_tokens": 32}
request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
answer = urllib.request.urlopen(request, timeout=120)
call = get("/api/calls/" + answer.headers["x-meshnet-call"])
print(json.dumps({"text": json.load(answer)["choices"][0]["message"]["content"], "stages": call["stages"],
    "nodes": get("/api/nodes")["nodes"]}))
"""


def test_a_call_crosses_hosts(demo: Demo, tmp_path: Path) -> None:
    with hosts(3) as (control, first, second):
        tracker = Process(
            [
                "tracker",
                "--host",
                control.address,
                "--port",
                "8080",
                "--grpc-port",
                "8081",
                "--data",
                str(tmp_path / "tracker"),
                "--json",
            ],
            tmp_path / "tracker.log",
            prefix=control.prefix,
        )
        running = [tracker]
        try:
            info = tracker.line()
            for name, host, layers in (("one", first, "0-14"), ("two", second, "15-29")):
                running.append(
                    Process(
                        [
                            "node",
                            "--tracker",
                            f"http://{control.address}:8080",
                            "--model",
                            "smollm2",
                            "--layers",
                            layers,
                            "--name",
                            name,
                            "--host",
                            host.address,
                            "--data",
                            str(tmp_path / name),
                            "--json",
                        ],
                        tmp_path / f"{name}.log",
                        {"MESHNET_JOIN_TOKEN": info["join_token"]},
                        prefix=host.prefix,
                    )
                )
            for process in running[1:]:
                process.line()
            asked = subprocess.run(
                [
                    *control.prefix,
                    sys.executable,
                    "-c",
                    ASK,
                    f"http://{control.address}:8080",
                    info["api_key"],
                    info["admin_key"],
                ],
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert asked.returncode == 0, asked.stderr + tracker.tail()
        finally:
            for process in reversed(running):
                process.stop()
    answer = json.loads(asked.stdout)
    with demo.client() as client:
        assert answer["text"] == answer_text(chat(client, "What is the capital of France?"))
    assert [(s["name"], s["start_layer"], s["end_layer"]) for s in answer["stages"]] == [
        ("one", 0, 14),
        ("two", 15, 29),
    ]
    assert {node["grpc_address"] for node in answer["nodes"]} == {
        f"{first.address}:7001",
        f"{second.address}:7001",
    }
