"""Honest books on a real mesh: a pipeline of two nodes that can be made to compute wrongly, and a whole one.

One mesh for all tests, in this order: what nobody meets at home, prices, suspects, audits, broken routes, and
at the end a backup, a lost key and a restored tracker.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from support.mesh import Mesh, run_mesh
from support.quad import Heard, ask, wait_for
from typer.testing import CliRunner

from meshnet.cli import build_app

WRONG = Path(__file__).parent.parent / "support" / "wrong"
NODE = ("--threads", "1", "--slots", "4", "--ctx", "512")
PATIENT = {
    "MESHNET_TRACKER_LEASE_MS": "20000",
    "MESHNET_TRACKER_PARK_S": "2",
    "MESHNET_TRACKER_FLAP_FREE": "100",
}
PIPELINE = ("head", "tail")
SHORT = [
    {"role": "user", "content": "2+2? Answer with the number only."},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "1+1? Answer with the number only."},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3+3? Answer with the number only."},
]
"""SmolLM2 ends its answer to this after one token, and rightly so."""
STORY = "Tell me a story about a lighthouse keeper and the sea."
INPUT, OUTPUT = 1, 2
"""Micro-units per token, once `priced`."""


class Books:
    """The mesh, and what its books say."""

    def __init__(self, mesh: Mesh, mode: Path) -> None:
        self.mesh = mesh
        self._mode = mode

    def compute(self, mode: str) -> None:
        """`flip` or `stop`: how the pipeline is wrong from now on; empty: not at all."""
        self._mode.write_text(mode)

    @property
    def data(self) -> str:
        return str(self.mesh.folder / "tracker")

    def call(self, call_id: str) -> dict[str, Any]:
        return dict(self.mesh.get(f"/api/calls/{call_id}/ledger"))

    def ended(self, call_id: str) -> dict[str, Any]:
        """The call's ledger once it is not open any more; a free call's is written a moment later."""

        def look() -> dict[str, Any] | None:
            with self.mesh.client(admin=True) as client:
                answer = client.get(f"/api/calls/{call_id}/ledger")
            found = dict(answer.json()) if answer.status_code == 200 else None
            return found if found and found["status"] != "open" else None

        return wait_for(look)

    def closed(self, call_id: str) -> dict[str, Any]:
        """The call's case, once a check has closed it."""

        def look() -> dict[str, Any] | None:
            cases = self.mesh.get("/api/suspects")["suspects"]
            return next((case for case in cases if case["call_id"] == call_id and case["closed_at"]), None)

        return wait_for(look)

    def trust(self) -> dict[str, float]:
        return {node["name"]: node["trust"] for node in self.mesh.get("/api/nodes")["nodes"]}

    def samples(self) -> dict[str, tuple[int, Any]]:
        """Per node how many samples count, and the speed that they show."""
        nodes = self.mesh.get("/api/statistics")["nodes"]
        return {node["node_id"]: (node["samples"], node["decode_ms_per_layer"]) for node in nodes}

    def sound(self) -> dict[str, Any]:
        report = self.mesh.get("/api/ledger/check")
        assert report["ok"], report
        return dict(report)


def kinds(booked: dict[str, Any]) -> list[str]:
    """Which kinds of entries a call has, each once, in their order."""
    return list(dict.fromkeys(entry["kind"] for entry in booked["entries"]))


def paid(booked: dict[str, Any]) -> int:
    """What a call should cost by its usage."""
    return int(booked["prompt_tokens"] * INPUT + booked["output_tokens"] * OUTPUT)


def shares(booked: dict[str, Any]) -> dict[str, int]:
    """What each book got of a settled call."""
    got: dict[str, int] = {}
    for entry in booked["entries"]:
        if entry["kind"] == "settle":
            got[entry["target"]] = got.get(entry["target"], 0) + entry["amount"]
    return got


def meshnet(*arguments: str, key: str = "") -> str:
    """What a command prints; fails with its message."""
    result = CliRunner().invoke(build_app(arguments[0]), list(arguments), env={"MESHNET_API_KEY": key})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Books]:
    folder = tmp_path_factory.mktemp("books")
    mode = folder / "mode"
    path = os.pathsep.join([str(WRONG), *filter(None, [os.environ.get("PYTHONPATH")])])
    with run_mesh(folder) as mesh:
        mesh.start_tracker(env=PATIENT)
        for name, layers in (("head", "0-14"), ("tail", "15-29")):
            mesh.start_node(name, layers, *NODE, env={"PYTHONPATH": path, "MESHNET_TEST_WRONG": str(mode)})
        mesh.start_node("whole", "0-29", *NODE)
        mesh.wait_ready()
        yield Books(mesh, mode)


@pytest.fixture(scope="module")
def priced(books: Books) -> Books:
    """Prices are set, the mesh takes a tenth, and only the tests that say so are audited."""
    tracker = ("--tracker", books.mesh.root)
    admin = books.mesh.info["admin_key"]
    meshnet("price", "set", "*", "--input", str(INPUT), "--output", str(OUTPUT), *tracker, key=admin)
    meshnet("ledger", "rules", "--mesh-share", "10", "--audit", "0", *tracker, key=admin)
    return books


def pipeline(books: Books, prompt: str = STORY, **parameters: Any) -> Heard:
    return ask(books.mesh, prompt, nodes=PIPELINE, **parameters)


def test_at_home_nobody_meets_the_books(books: Books) -> None:
    key = str(books.mesh.info["api_key"])
    heard = ask(books.mesh, STORY, key=key, stream=False, max_tokens=8)
    assert heard.text
    booked = books.ended(heard.call_id)
    assert (booked["status"], booked["reserved"], booked["charge"]) == ("settled", 0, 0)
    assert [entry["amount"] for entry in booked["entries"]] == [0]
    assert booked["output_tokens"] == 8
    with books.mesh.client() as client:
        me = client.get("/api/me").json()
    assert (me["key"]["account"], me["unlimited"], me["balance"], me["held"]) == ("home", True, 0, 0)
    assert books.sound()["calls"] == 1


def test_commands_against_the_live_tracker_and_against_its_data(priced: Books) -> None:
    live = ("--tracker", priced.mesh.root)
    disk = ("--data", priced.data)
    admin = str(priced.mesh.info["admin_key"])
    meshnet("account", "create", "bob", *disk)
    meshnet("account", "deposit", "bob", "0.0003", "--reference", "r1", *live, key=admin)
    meshnet("account", "deposit", "bob", "0.0003", "--reference", "r1", *disk)
    shown = json.loads(meshnet("account", "show", "bob", "--json", *live, key=admin))
    assert (shown["balance"], shown["held"]) == (300, 0)
    secret = meshnet("key", "create", "laptop", "--account", "bob", *disk).strip()
    assert secret not in meshnet("key", "list", "--json", *live, key=admin)

    def answered() -> Heard | None:
        heard = ask(priced.mesh, STORY, key=secret, stream=False, max_tokens=10)
        return heard if heard.status != 401 else None

    heard = wait_for(answered)
    booked = priced.ended(heard.call_id)
    assert (booked["account"], booked["key"], booked["status"]) == ("bob", "laptop", "settled")
    assert booked["charge"] == paid(booked) > 0
    assert json.loads(meshnet("ledger", "call", heard.call_id, "--json", *disk))["charge"] == booked["charge"]
    left = json.loads(meshnet("account", "show", "bob", "--json", *disk))["balance"]
    assert left == 300 - booked["charge"]
    refused = ask(priced.mesh, STORY, key=secret, stream=False, max_tokens=1000)
    assert (refused.status, refused.error and refused.error["code"]) == (429, "insufficient_quota")
    assert "output / 1M" in meshnet("price", "list", *disk)
    key_id = next(k["id"] for k in priced.mesh.get("/api/keys")["keys"] if k["name"] == "laptop")
    meshnet("key", "revoke", str(key_id), *disk)
    wait_for(lambda: ask(priced.mesh, STORY, key=secret, stream=False, max_tokens=1).status == 401)
    priced.sound()


def test_a_suspect_call_is_held_checked_on_another_route_and_charged_once(priced: Books) -> None:
    """While the other node stands still nothing can be confirmed, and nothing is charged."""
    whole = priced.mesh.nodes["whole"]

    def stop(piece: int) -> None:
        whole.signal(signal.SIGSTOP)

    try:
        heard = pipeline(priced, messages=SHORT, on_piece=stop)
        assert heard.finish == "stop"
        held = priced.ended(heard.call_id)
        assert (held["status"], held["charge"], held["output_tokens"]) == ("held", 0, 1)
        assert kinds(held) == ["reserve"]
        assert priced.mesh.get("/api/accounts/home")["held"] == held["reserved"] > 0
        priced.sound()
    finally:
        whole.signal(signal.SIGCONT)
    case = priced.closed(heard.call_id)
    assert (case["cause"], case["state"]) == ("suspect", "confirmed"), case
    assert [check["nodes"] for check in case["checks"]] == [[priced.mesh.ready["whole"]["node_id"]]]
    booked = priced.ended(heard.call_id)
    assert (booked["status"], booked["charge"]) == ("settled", paid(booked))
    assert kinds(booked) == ["reserve", "settle", "release"]
    assert priced.mesh.get("/api/accounts/home")["held"] == 0
    priced.sound()


def test_a_pipeline_that_ends_at_once_earns_nothing_and_wins_no_route(priced: Books) -> None:
    """The story: layers are lost, the answer ends after a token, at a speed that no honest route has."""
    before = priced.samples()
    priced.compute("stop")
    heard = pipeline(priced)
    priced.compute("")
    assert heard.finish == "stop"
    case = priced.closed(heard.call_id)
    assert (case["cause"], case["state"]) == ("suspect", "refuted"), case
    booked = priced.ended(heard.call_id)
    assert (booked["status"], booked["charge"], kinds(booked)) == ("released", 0, ["reserve", "release"])
    after = priced.samples()
    assert {node: after[node] for node in before} == before
    pipeline_ids = {priced.mesh.ready[name]["node_id"] for name in PIPELINE}
    excluded = {n["node_id"]: n["excluded"] for n in priced.mesh.get("/api/statistics")["nodes"]}
    assert all(sum(excluded[node].values()) >= 1 for node in pipeline_ids), excluded
    trust = priced.trust()
    assert trust["head"] < 0.5
    assert trust["tail"] < 0.5
    assert trust["whole"] == 1.0
    console = priced.mesh.get("/api/console?since=0")["events"]
    ended = [event for event in console if event["event"] == "check ended"]
    assert [event["passed"] for event in ended if event["call_id"] == heard.call_id] == [False]
    assert ask(priced.mesh, STORY, max_tokens=8).nodes == ["whole"]
    priced.sound()


def test_audits_in_idle_time_give_trust_back_and_find_a_node_that_computes_wrongly(priced: Books) -> None:
    admin = str(priced.mesh.info["admin_key"])
    tracker = ("--tracker", priced.mesh.root)
    meshnet("ledger", "rules", "--audit", "100", *tracker, key=admin)
    lost = priced.trust()
    heard = pipeline(priced, max_tokens=10, temperature=0.8, seed=7, presence_penalty=0.5)
    case = priced.closed(heard.call_id)
    assert (case["cause"], case["state"]) == ("audit", "confirmed"), case
    good = priced.call(heard.call_id)
    assert (good["status"], good["charge"]) == ("settled", paid(good))
    back = priced.trust()
    assert 1.0 - back["head"] <= 0.6 * (1.0 - lost["head"])
    priced.compute("flip")
    heard = pipeline(priced, max_tokens=10, logit_bias={"2": -100})
    priced.compute("")
    assert (heard.finish, heard.error) == ("length", None)
    case = priced.closed(heard.call_id)
    assert (case["cause"], case["state"]) == ("audit", "refuted"), case
    booked = wait_for(lambda: b if (b := priced.call(heard.call_id))["status"] == "refunded" else None)
    assert kinds(booked) == ["reserve", "settle", "release", "refund"]
    assert priced.trust()["head"] < 0.5 < back["head"]
    meshnet("ledger", "rules", "--audit", "0", *tracker, key=admin)
    priced.sound()


def test_a_client_that_leaves_pays_for_what_was_produced(priced: Books) -> None:
    key = priced.mesh.info["admin_key"]
    headers = {"Authorization": f"Bearer {key}", "X-Meshnet-Nodes": ",".join(PIPELINE)}
    body = {"model": "smollm2", "messages": [{"role": "user", "content": STORY}], "stream": True}
    with (
        httpx.Client(base_url=priced.mesh.root, headers=headers, timeout=60.0) as client,
        client.stream("POST", "/v1/chat/completions", json=body | {"temperature": 0}) as answer,
    ):
        call_id = answer.headers["x-meshnet-call"]
        lines = (line for line in answer.iter_lines() if '"content":' in line)
        for _ in range(6):
            next(lines)
    booked = priced.ended(call_id)
    assert (booked["outcome"], booked["status"]) == ("cancelled", "settled")
    assert 5 <= booked["output_tokens"] < 400
    assert booked["charge"] == paid(booked) < booked["reserved"]
    assert booked["output_tokens"] == priced.mesh.get(f"/api/calls/{call_id}")["output_tokens"]
    priced.sound()


def test_nodes_earn_by_what_they_did_also_when_a_call_moved(priced: Books) -> None:
    def kill(piece: int) -> None:
        if piece == 10:
            priced.mesh.nodes["tail"].kill()

    heard = pipeline(priced, max_tokens=30, on_piece=kill)
    assert (heard.error, heard.ended) == (None, 1)
    assert priced.mesh.get(f"/api/calls/{heard.call_id}")["reroutes"] == 1
    booked = priced.ended(heard.call_id)
    assert (booked["status"], booked["output_tokens"], booked["charge"]) == ("settled", 30, paid(booked))
    names = {priced.mesh.ready[name]["node_id"]: name for name in priced.mesh.nodes}
    decoded: dict[str, int] = {}
    for work in booked["work"]:
        assert work["layers"] == 15
        name = names[work["node_id"]]
        decoded[name] = decoded.get(name, 0) + work["decode_tokens"]
    assert set(decoded) == {"head", "tail", "whole"}
    assert decoded["tail"] < decoded["head"]
    assert decoded["whole"] < decoded["head"]
    got = shares(booked)
    # A tenth, rounded half up, is the mesh's; the nodes have the rest to the micro-unit.
    assert got.pop("mesh") == (booked["charge"] + 5) // 10
    nodes = {book: amount for book, amount in got.items() if book.startswith("node:")}
    assert sum(nodes.values()) == booked["charge"] - (booked["charge"] + 5) // 10
    assert set(nodes) == {f"node:{node_id}" for node_id in names}
    priced.sound()


def test_a_call_that_fails_on_our_side_costs_nothing(priced: Books) -> None:
    def kill(piece: int) -> None:
        if piece == 3:
            priced.mesh.nodes["whole"].kill()

    heard = ask(priced.mesh, STORY, max_tokens=200, on_piece=kill)
    assert heard.nodes[-1] == "whole"
    assert heard.error is not None
    assert heard.error["code"] == "route_lost"
    booked = priced.ended(heard.call_id)
    assert (booked["status"], booked["charge"], kinds(booked)) == ("released", 0, ["reserve", "release"])


def test_the_ledger_holds_after_all_of_it(priced: Books) -> None:
    disk = ("--data", priced.data)
    report = json.loads(meshnet("ledger", "check", "--json", *disk))
    assert report == priced.sound()
    rows = list(csv.DictReader(io.StringIO(meshnet("ledger", "export", "--csv", *disk))))
    assert len(rows) == report["entries"]
    earned = sum(node["earned"] for node in priced.mesh.get("/api/earnings")["nodes"])
    into = sum(int(row["amount"]) for row in rows if row["target"].startswith("node:"))
    out = sum(int(row["amount"]) for row in rows if row["source"].startswith("node:"))
    assert earned == into - out > 0


def test_a_lost_admin_key_a_backup_and_a_restored_tracker(priced: Books, tmp_path: Path) -> None:
    mesh, disk = priced.mesh, ("--data", priced.data)
    before = priced.sound()
    file = tmp_path / "backup.db"
    assert "all check out" in meshnet("data", "backup", str(file), *disk)
    found = meshnet("data", "admin-key", "--revoke-others", *disk).strip()
    old = mesh.info["admin_key"]

    def status(key: str) -> int:
        answer = httpx.get(f"{mesh.root}/api/keys", headers={"Authorization": f"Bearer {key}"}, timeout=30.0)
        return answer.status_code

    wait_for(lambda: status(old) == 401)
    assert status(found) == 200
    assert mesh.tracker is not None
    result = CliRunner().invoke(build_app("data"), ["data", "restore", str(file), "--replace", *disk])
    assert result.exit_code == 1
    assert "tracker is running" in result.output
    mesh.tracker.stop()
    meshnet("data", "restore", str(file), "--replace", *disk)
    mesh.start_tracker(env=PATIENT)
    assert (status(old), status(found)) == (200, 401)
    assert priced.sound()["entries"] == before["entries"]
    mesh.wait_ready("head")
