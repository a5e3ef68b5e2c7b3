"""Two trackers on one PostgreSQL are one mesh, and one of them is killed."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from books.postgres import Postgres
from support.mesh import Mesh, run_mesh
from support.quad import Asking, Heard, ask, wait_for

PROMPT = "Tell me a story about a lighthouse keeper and the sea."
SLOTS = 2
NODE = ("--threads", "1", "--slots", str(SLOTS), "--ctx", "512")
MOVED_SECONDS = 20.0


@dataclass
class Pair:
    """`one` has the head on its membership stream, `two` the tail."""

    one: Mesh
    two: Mesh

    def both(self) -> tuple[Mesh, Mesh]:
        return self.one, self.two


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="meshnet-postgres-") as folder:
        server = Postgres(Path(folder) / "data")
        yield asyncio.run(server.new_database(empty=True))
        server.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("trackers")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with run_mesh(folder / "one") as one, run_mesh(folder / "two") as two:
        one.start_tracker("--database", database)
        two.start_tracker("--database", database)
        two.info |= {key: one.info[key] for key in ("api_key", "admin_key", "join_token")}
        one.start_node("head", "0-14", *NODE)
        two.start_node("tail", "15-29", *NODE)
        pair = Pair(one, two)
        one.wait_ready("head")
        two.wait_ready("tail")
        for mesh in pair.both():
            wait_for(lambda mesh=mesh: ready(mesh) == {"head", "tail"})  # type: ignore[misc]
        yield pair


def ready(mesh: Mesh) -> set[str]:
    return {node["name"] for node in mesh.get("/api/nodes")["nodes"] if node["ready"]}


def live(mesh: Mesh, call_id: str) -> dict[str, Any] | None:
    return next((call for call in mesh.get("/api/calls")["calls"] if call["id"] == call_id), None)


@pytest.fixture(scope="module")
def answer(pair: Pair) -> str:
    """What every undisturbed call says."""
    heard = ask(pair.one, PROMPT, max_tokens=24)
    assert heard.nodes == ["head", "tail"]
    return heard.text


def test_nodes_of_both_serve_the_calls_of_each(pair: Pair, answer: str) -> None:
    heard = ask(pair.two, PROMPT, max_tokens=24)
    assert (heard.text, heard.nodes) == (answer, ["head", "tail"])
    infos = [mesh.get("/api/join-info") for mesh in pair.both()]
    assert infos[0]["mesh_id"] == infos[1]["mesh_id"]
    assert set(infos[0]["trackers"]) == set(infos[1]["trackers"]) == {pair.one.root, pair.two.root}


def test_keys_made_and_revoked_at_one_hold_at_the_other(pair: Pair) -> None:
    with pair.one.client(admin=True) as client:
        made = client.post("/api/keys", json={"account": "home", "name": "shared"}).json()
    secret, key_id = made["secret"], made["key"]["id"]
    assert wait_for(lambda: ask(pair.two, PROMPT, key=secret, stream=False, max_tokens=2).status == 200)
    with pair.two.client(admin=True) as client:
        assert client.delete(f"/api/keys/{key_id}").status_code == 200
    wait_for(lambda: ask(pair.one, PROMPT, key=secret, stream=False, max_tokens=2).status == 401)


def test_calls_of_one_show_at_the_other(pair: Pair) -> None:
    seen: list[dict[str, Any]] = []
    listening = threading.Event()

    def listen() -> None:
        """The other tracker's event stream, until the call shows in it."""
        with (
            pair.two.client(admin=True) as client,
            client.stream("GET", "/api/events") as stream,
        ):
            for line in stream.iter_lines():
                listening.set()
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                found = event["value"] if event.get("kind") == "call" else None
                if found and found["tracker"] == pair.one.root and found["ended_ms"] is None:
                    seen.append(found)
                    return

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(listen)
        assert listening.wait(30.0)
        call = Asking(pair.one, PROMPT, max_tokens=300)
        watching.result(60.0)
        shown = live(pair.two, seen[0]["id"])
        assert shown is not None
        assert (shown["tracker"], shown["ended_ms"]) == (pair.one.root, None)
        assert [stage["name"] for stage in shown["stages"]] == ["head", "tail"]
        assert pair.two.get(f"/api/calls/{shown['id']}")["timeline"]
        assert pair.one.get(f"/api/calls/{shown['id']}")["tracker"] is None
        with pair.two.client(admin=True) as client:
            assert client.delete(f"/api/calls/{shown['id']}").json()["phase"] == "cancelled"
    heard = call.result()
    assert heard.call_id == seen[0]["id"]
    assert heard.error is not None
    assert heard.error["code"] == "cancelled"


def test_a_node_is_the_authority_over_its_own_slots(pair: Pair, answer: str) -> None:
    """Each tracker counts on all slots; together they ask for three times as many."""
    calls = [Asking(mesh, PROMPT, max_tokens=24) for mesh in pair.both() for _ in range(3 * SLOTS // 2)]
    assert [call.result().text for call in calls] == [answer] * len(calls)


def test_one_tracker_is_killed_and_the_other_does_not_notice(pair: Pair, answer: str, database: str) -> None:
    """Its node comes over, running and new calls at the other say what they always say, its money is free."""
    one, two = pair.both()
    with one.client(admin=True) as client:
        price = {"model": "*", "input": 1_000_000, "output": 1_000_000}
        assert client.post("/api/prices", json=price).status_code == 201
    killed = threading.Event()
    doomed: list[str] = []

    def doom() -> None:
        with (
            one.client(admin=True) as client,
            client.stream(
                "POST",
                "/v1/chat/completions",
                json={
                    "model": "smollm2",
                    "messages": [{"role": "user", "content": PROMPT}],
                    "stream": True,
                    "max_tokens": 400,
                },
            ) as stream,
        ):
            doomed.append(stream.headers["x-meshnet-call"])
            try:
                for _ in stream.iter_lines():
                    pass
            except Exception:
                assert killed.is_set()

    def kill(piece: int) -> None:
        if piece == 8:
            assert one.tracker is not None
            killed.set()
            one.tracker.kill()

    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(doom)
        wait_for(lambda: bool(doomed))
        running = ask(two, PROMPT, max_tokens=24, on_piece=kill)
        assert (running.text, running.error) == (answer, None)
        after: list[Heard] = []
        while two.get(f"/api/calls/{doomed[0]}/ledger")["status"] == "open":
            after.append(ask(two, PROMPT, max_tokens=24, stream=len(after) % 2 == 0))
        lost.result(60.0)
    assert after
    assert [(heard.text, heard.error) for heard in after] == [(answer, None)] * len(after)
    released = two.get(f"/api/calls/{doomed[0]}/ledger")
    assert (released["status"], released["charge"]) == ("released", 0)
    nodes = {node["name"]: node for node in two.get("/api/nodes")["nodes"]}
    assert nodes["head"]["ready"]
    assert "no tracker" in one.nodes["head"].tail(400)
    assert one.nodes["head"].tail(400).count("joined") >= 2
    wait_for(lambda: two.get("/api/join-info")["trackers"] == [two.root], MOVED_SECONDS)
    assert ready(two) == {"head", "tail"}
    report = two.get("/api/ledger/check")
    assert report["ok"], report
    one.start_tracker("--database", database)
    wait_for(lambda: ready(one) == {"head", "tail"}, MOVED_SECONDS)
    assert ask(one, PROMPT, max_tokens=24).text == answer
