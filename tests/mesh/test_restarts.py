"""Trackers and nodes that come and go: who comes back, what is kept, who is kept apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gates import gates
from support.mesh import Mesh, run_mesh
from support.quad import Asking, Quad, ask, wait_for

LAYERS = {"a": "0-14", "b1": "15-29", "b2": "15-29"}
PROMPT = "Tell me a story about a lighthouse keeper and the sea."
BACK_SECONDS = 15.0
"""Three times the 5 s within which a tracker has its nodes back."""


@pytest.fixture(scope="module")
def quad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quad]:
    with run_mesh(tmp_path_factory.mktemp("restarts")) as mesh, gates() as links:
        running = Quad(mesh, links, LAYERS, ("--slots", "6", "--ctx", "640"))
        running.start()
        yield running


@pytest.fixture(autouse=True)
def mended(quad: Quad) -> Iterator[None]:
    """Whatever a test did, the next one finds all nodes ready."""
    yield
    quad.mend()


@pytest.fixture(scope="module")
def story(quad: Quad) -> str:
    """The undisturbed answer, long enough to do something meanwhile."""
    return ask(quad.mesh, PROMPT, max_tokens=160).text


def nodes(mesh: Mesh) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in mesh.get("/api/nodes")["nodes"]}


def test_a_node_that_comes_back_takes_part_again_without_a_hand(quad: Quad, story: str) -> None:
    before = nodes(quad.mesh)["b1"]
    quad.break_("b1", "kill")
    wait_for(lambda: nodes(quad.mesh)["b1"]["state"] == "lost")
    quad.start_node("b1")
    quad.mesh.wait_ready("b1")
    after = nodes(quad.mesh)["b1"]
    assert after["node_id"] == before["node_id"]
    heard = ask(quad.mesh, PROMPT, max_tokens=160, nodes=("a", "b1"))
    assert heard.nodes == ["a", "b1"]
    assert heard.text == story
    quad.settled()


def test_sigterm_lets_a_nodes_calls_finish_and_takes_no_new_ones(quad: Quad, story: str) -> None:
    others: list[Asking] = []

    def strike(piece: int) -> None:
        if piece == 5:
            quad.mesh.nodes["b1"].signal(signal.SIGTERM)
            wait_for(lambda: nodes(quad.mesh)["b1"]["state"] == "draining")
            others.append(Asking(quad.mesh, PROMPT, max_tokens=8))

    heard = ask(quad.mesh, PROMPT, max_tokens=160, nodes=("a", "b1"), on_piece=strike)
    assert heard.text == story
    assert quad.call(heard.call_id)["reroutes"] == 0
    assert others[0].result().nodes == ["a", "b2"]
    assert quad.mesh.nodes["b1"].popen.wait(30.0) == 0
    quad.mend()
    quad.settled()


def test_a_second_sigterm_moves_the_calls_that_are_left(quad: Quad, story: str) -> None:
    def strike(piece: int) -> None:
        if piece == 5:
            quad.mesh.nodes["b1"].signal(signal.SIGTERM)
            wait_for(lambda: nodes(quad.mesh)["b1"]["state"] == "draining")
            quad.mesh.nodes["b1"].signal(signal.SIGTERM)

    heard = ask(quad.mesh, PROMPT, max_tokens=160, nodes=("a", "b1"), on_piece=strike)
    assert heard.error is None, heard
    assert heard.text == story
    assert quad.call(heard.call_id)["reroutes"] == 1
    assert quad.mesh.nodes["b1"].popen.wait(30.0) == 0
    quad.mend()
    quad.settled()


def command(quad: Quad, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshnet", *arguments, "--tracker", quad.mesh.root],
        env={**os.environ, "MESHNET_API_KEY": str(quad.mesh.info["admin_key"])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [("drain",), ("node", "drain")])
def test_a_drain_by_command_can_be_undone(quad: Quad, words: tuple[str, ...]) -> None:
    done = command(quad, *words, "b1")
    assert (done.returncode, done.stdout) == (0, "b1: draining\n"), done.stderr
    assert {ask(quad.mesh, PROMPT, max_tokens=4).route for _ in range(3)} == {"a[0-14]>b2[15-29]"}
    undone = command(quad, *words, "b1", "--undo")
    assert undone.returncode == 0, undone.stderr
    quad.mesh.wait_ready("b1")
    assert ask(quad.mesh, PROMPT, max_tokens=4, nodes=("a", "b1")).nodes == ["a", "b1"]
    unknown = command(quad, *words, "nobody")
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_a_killed_tracker_has_everything_back(quad: Quad, story: str) -> None:
    """Nodes, keys, weights and ledger; and what calls had reserved that died with it."""
    mesh = quad.mesh
    with mesh.client(admin=True) as client:
        weights = {"default": {"weights": {"latency": 2.5}}}
        client.put("/api/settings/routing", json=weights).raise_for_status()
        price = {"model": "smollm2-135m-instruct", "input": 1_000_000, "output": 2_000_000}
        client.post("/api/prices", json=price).raise_for_status()
    paid = ask(mesh, PROMPT, max_tokens=8, key=mesh.info["api_key"])
    assert paid.error is None
    dying = [Asking(mesh, PROMPT, max_tokens=400) for _ in range(3)]
    wait_for(lambda: sum(c["output_tokens"] > 3 for c in mesh.get("/api/calls")["calls"][:3]) == 3)
    ledger = mesh.get(f"/api/calls/{paid.call_id}/ledger")
    assert mesh.tracker is not None
    mesh.tracker.kill()
    for call in dying:
        call.join(60.0)
        assert not call.is_alive()
    mesh.start_tracker(env={"MESHNET_TRACKER_FLAP_FREE": "100000"})
    begun = time.monotonic()
    mesh.wait_ready(*LAYERS)
    assert time.monotonic() - begun < BACK_SECONDS
    settings = mesh.get("/api/settings/routing")
    assert settings["default"]["weights"]["latency"] == 2.5
    assert mesh.get(f"/api/calls/{paid.call_id}/ledger") == ledger
    again = ask(mesh, PROMPT, max_tokens=160, key=mesh.info["api_key"])
    assert again.text == story
    wait_for(lambda: not any(account["held"] for account in mesh.get("/api/accounts")["accounts"]))
    quad.settled()


def test_nodes_of_two_meshes_never_mix(quad: Quad, tmp_path: Path) -> None:
    """A token or a credential of one mesh opens no other, and says so."""
    with run_mesh(tmp_path) as other:
        other.start_tracker()
        for arguments, token in (
            # A stranger's token; then a member's own folder and credential, at the wrong tracker.
            (("--data", str(tmp_path / "fresh")), quad.mesh.info["join_token"]),
            (("--data", str(quad.mesh.folder / "c")), ""),
        ):
            if not token:
                quad.mesh.start_node("c", "0-29", "--threads", "1")
                quad.mesh.wait_ready("c")
                quad.mesh.nodes.pop("c").stop()
            stray = other.start_node("stray", "0-29", *arguments, env={"MESHNET_JOIN_TOKEN": str(token)})
            with pytest.raises(AssertionError, match="before it was ready"):
                stray.line()
            said = stray.tail(1)
            assert "refuses this node" in said
            assert "token" in said
        assert nodes(other) == {}
