"""Empty nodes: the tracker places layers on them, and the bytes come from whoever has them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.gates import free_port, gates
from support.hub import run_hub
from support.mesh import Demo, Mesh, Process, answer_text, chat
from support.namespaces import Host, hosts, inside, reason_not_allowed
from support.smollm2 import smollm2_path
from support.split_gguf import write_split

WAIT_S = 120.0
PROMPT = "What is the capital of France?"


def link_of(mesh: Mesh) -> str:
    with mesh.client(admin=True) as client:
        return str(client.post("/api/invite", json={}).json()["join_link"])


def empty_node(mesh: Mesh, name: str, *arguments: str, link: str = "", on: Host | None = None) -> Process:
    """A node with a cache of its own, as on a machine that has nothing yet."""
    process = Process(
        [
            "node",
            link or link_of(mesh),
            "--name",
            name,
            *("--port", "0", "--grpc-port", "0", "--ctx", "512", "--slots", "4", "--replay-buffer", "0"),
            *("--data", str(mesh.folder / name), "--json"),
            *arguments,
        ],
        mesh.folder / f"{name}.log",
        {"MESHNET_CACHE": str(mesh.folder / f"cache-{name}")},
        prefix=on.prefix if on is not None else (),
    )
    mesh.nodes[name] = process
    mesh._spent.append(process)
    return process


def wait(mesh: Mesh, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
    """Until the condition holds of the nodes by name."""
    deadline = time.monotonic() + WAIT_S
    while True:
        nodes = {node["name"]: node for node in mesh.get("/api/nodes")["nodes"]}
        if condition(nodes):
            return nodes
        assert time.monotonic() < deadline, (nodes, mesh.get("/api/placement"))
        time.sleep(0.1)


def covers(nodes: dict[str, dict[str, Any]], *names: str) -> bool:
    held = {x for n in names if n in nodes for a, b in nodes[n]["served_layers"] for x in range(a, b + 1)}
    return held == set(range(30)) and all(name in nodes and nodes[name]["ready"] for name in names)


def stages_of(mesh: Mesh, call_id: str) -> list[tuple[str, int, int]]:
    return [
        (s["name"], s["start_layer"], s["end_layer"]) for s in mesh.get(f"/api/calls/{call_id}")["stages"]
    ]


def test_an_empty_node_takes_its_layers_from_its_neighbour_over_a_line_that_breaks(
    demo: Demo, mesh: Mesh
) -> None:
    mesh.start_tracker(env={"MESHNET_CACHE": str(mesh.folder / "cache-tracker")})
    with gates() as lines:
        port = free_port()
        shown = lines.add("first", port)
        mesh.start_node(
            "first",
            "0-14",
            "--port",
            str(port),
            "--advertise-port",
            str(shown),
            "--ctx",
            "512",
            "--slots",
            "4",
        )
        mesh.wait_ready("first")
        lines.set("first", bytes_per_s=15e6)
        empty_node(mesh, "second")
        wait(mesh, lambda _: lines.passed("first") > 15_000_000)
        lines.cut("first")
        fetched = mesh.get("/api/nodes")["nodes"]
        lines.mend("first")
        nodes = wait(mesh, lambda nodes: covers(nodes, "first", "second"))
        (shard,) = nodes["second"]["shards"]
        assert any(s["fetch"] for n in fetched for s in n["shards"]), "how far it is can be seen"
        # What had come before the cut stayed: its layers, the shared matrix and two manifests passed once.
        size = 30_081_024 + 2_216_448 * (30 - shard["start_layer"])
        assert size < lines.passed("first") < size + 12_000_000
        with mesh.client(admin=True) as client, demo.client() as whole:
            # However the layers were balanced, the second node can be entered where the first one ends.
            answer = chat(client, PROMPT, headers={"X-Meshnet-Nodes": "first,second"})
            assert answer_text(answer) == answer_text(chat(whole, PROMPT))
    assert shard["start_layer"] <= 15
    assert shard["end_layer"] == 29
    assert nodes["second"]["placed"]
    assert not nodes["first"]["placed"]
    assert stages_of(mesh, answer.headers["x-meshnet-call"]) == [("first", 0, 14), ("second", 15, 29)]
    assert not (mesh.folder / "cache-second" / "models").exists(), "it has its layers and nothing else"


@pytest.mark.skipif(reason_not_allowed() is not None, reason=str(reason_not_allowed()))
def test_a_file_of_the_tracker_alone_is_spread_over_three_hosts(demo: Demo, mesh: Mesh) -> None:
    with demo.client() as whole:
        expected = answer_text(chat(whole, PROMPT))
    with hosts(4) as (control, *machines):
        arguments = ["tracker", "--host", control.address, "--data", str(mesh.folder / "tracker"), "--json"]
        tracker = Process(arguments, mesh.folder / "tracker.log", prefix=control.prefix)
        mesh._spent.append(tracker)
        try:
            mesh.info = tracker.line()
            inside(control, lambda: spread(mesh, machines, expected))
        finally:
            mesh.stop()


def spread(mesh: Mesh, machines: Sequence[Host], expected: str) -> None:
    link = link_of(mesh)
    for name, machine in zip(("one", "two", "three"), machines, strict=True):
        # With what llama.cpp needs besides the weights, it takes all three.
        empty_node(mesh, name, "--memory", str(155_000_000), "--host", machine.address, link=link, on=machine)
    with mesh.client(admin=True) as admin:
        assert admin.post("/api/models", json={"model": str(smollm2_path())}).status_code == 202
        nodes = wait(mesh, lambda nodes: covers(nodes, "one", "two", "three"))
        assert all(node["served_layers"] not in ([], [[0, 29]]) for node in nodes.values())
        model = mesh.get("/api/placement")["models"][0]
        assert model["state"] == "ready"
        assert any("stages cover 30 layers" in line for line in model["why"])
        answer = chat(admin, PROMPT, model=model["id"])
        assert answer_text(answer) == expected
        assert len(stages_of(mesh, answer.headers["x-meshnet-call"])) == 3
        # A further name, and the model let go of again.
        assert admin.put("/api/models/aliases/mine", json={"model": model["id"]}).status_code == 200
        assert answer_text(chat(admin, PROMPT, model="mine")) == expected
        assert "mine" in admin.get("/v1/models").json()["data"][0]["aliases"]
        assert admin.delete("/api/models/mine").json() == {"id": model["id"], "held_by": []}
        wait(mesh, lambda nodes: all(node["served_layers"] == [] for node in nodes.values()))
        assert chat(admin, PROMPT, model=model["id"]).status_code == 404


def test_a_split_model_on_a_hub_takes_the_room_of_an_idle_one(mesh: Mesh, demo: Demo) -> None:
    """The second model: the same weights under another name, in parts, as a whole on no disk of the mesh."""
    parts = write_split(smollm2_path(), mesh.folder / "parts", name="Twin", tensors=140)
    assert len(parts) > 1
    files = {f"org/repo/{part.name}": part.read_bytes() for part in parts}
    with run_hub(files) as hub:
        caches = {"MESHNET_CACHE": str(mesh.folder / "cache-tracker"), "HF_ENDPOINT": hub.url}
        mesh.start_tracker(env=caches)
        empty_node(mesh, "only", "--memory", str(250_000_000))
        with mesh.client(admin=True) as admin, demo.client() as whole:
            assert admin.post("/api/models", json={"model": str(smollm2_path())}).status_code == 202
            wait(mesh, lambda nodes: covers(nodes, "only"))
            first = mesh.get("/api/models")["models"][0]["id"]
            expected = answer_text(chat(whole, PROMPT))
            assert answer_text(chat(admin, PROMPT, model=first)) == expected
            loaded = meshnet(mesh, "model", "load", f"hf:org/repo/{parts[0].name}")
            assert loaded.returncode == 0, loaded.stderr
            twin = loaded.stdout.partition(":")[0]
            assert "reading" in loaded.stderr
            assert answer_text(chat(admin, PROMPT, model=twin)) == expected
            states = {model["id"]: model for model in mesh.get("/api/placement")["models"]}
            assert (states[first]["state"], states[twin]["state"]) == ("evicted", "ready")
            assert f"makes room for {twin}" in states[first]["reason"]
            console = [event["line"] for event in mesh.get("/api/console")["events"]]
            assert any(f"model {first} is unloaded" in line for line in console)
            assert admin.put("/api/models/default", json={"model": twin}).json() == {"default": twin}
            assert admin.put("/api/models/aliases/both", json={"model": twin}).status_code == 200
            listed = {model["id"]: model for model in mesh.get("/api/models")["models"]}
            assert listed[twin]["default"]
            assert listed[twin]["aliases"] == ["both"]
            placed = meshnet(mesh, "place", "--model", "both", "--explain")
            assert "only: layers 0-29" in placed.stdout
    for cache in ("cache-tracker", "cache-only"):
        held = sum(path.stat().st_size for path in (mesh.folder / cache).rglob("*Twin*"))
        assert held == 0, "the parts are on no disk here"


def meshnet(mesh: Mesh, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MESHNET_API_KEY": str(mesh.info["admin_key"])}
    return subprocess.run(
        [sys.executable, "-m", "meshnet", *arguments, "--tracker", mesh.root],
        capture_output=True,
        text=True,
        env=environment,
    )
