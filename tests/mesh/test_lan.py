"""A mesh over several hosts: it speaks TLS by itself, lets no stranger in, and takes machines as they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mesh.test_hosts import ASK
from support.mesh import Demo, Process, answer_text, chat
from support.namespaces import Host, hosts, reason_not_allowed

pytestmark = pytest.mark.skipif(reason_not_allowed() is not None, reason=str(reason_not_allowed()))
TESTS = Path(__file__).parents[1]
GET = """
import json, sys, urllib.request as r
base, key, path = sys.argv[1:4]
body = sys.argv[4].encode() if len(sys.argv) > 4 else None
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
print(r.urlopen(r.Request(base + path, body, headers), timeout=20).read().decode())
"""


def python(host: Host, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*host.prefix, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env={**os.environ, "MESHNET_PARENT_PID": str(os.getpid()), **environment},
    )


def said(started: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, errors = started.communicate(timeout=120)
    assert started.returncode == code, (out, errors)
    return out, errors


@dataclass
class Lan:
    """A tracker on the first host, node one on the second, node two on the third; all joined by link."""

    control: Host
    first: Host
    second: Host
    tracker: Process
    info: dict[str, Any]
    link: str
    folder: Path
    nodes: dict[str, Process]
    ready: dict[str, dict[str, Any]]

    @property
    def root(self) -> str:
        return f"http://{self.control.address}:8080"

    def api(self, path: str, body: str | None = None) -> Any:
        """An answer of the management API, asked from the tracker's host."""
        arguments = [self.root, self.info["admin_key"], path, *([] if body is None else [body])]
        return json.loads(said(python(self.control, "-c", GET, *arguments))[0])

    def invite(self, **form: int) -> str:
        return str(self.api("/api/invite", json.dumps(form))["join_link"])

    def start(self, name: str, host: Host, link: str, layers: str, *arguments: str) -> Process:
        self.nodes[name] = Process(
            [
                *("node", link, "--model", "smollm2", "--layers", layers, "--name", name),
                *("--ctx", "512", "--slots", "4"),
                *("--data", str(self.folder / name), "--json", *arguments),
            ],
            self.folder / f"{name}.log",
            prefix=host.prefix,
        )
        return self.nodes[name]

    def stop(self) -> None:
        for process in self.nodes.values():
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        for process in self.nodes.values():
            process.stop()

    def node(self, name: str) -> dict[str, Any]:
        return next((n for n in self.api("/api/nodes")["nodes"] if n["name"] == name), {})

    def until(self, found: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < deadline, self.api("/api/nodes")
            time.sleep(0.1)

    def ask(self) -> dict[str, Any]:
        """The answer to ASK, once two nodes are ready."""
        asking = python(self.control, "-c", ASK, self.root, self.info["api_key"], self.info["admin_key"])
        answer: dict[str, Any] = json.loads(said(asking)[0])
        assert [(s["name"], s["start_layer"], s["end_layer"]) for s in answer["stages"]] == [
            ("one", 0, 14),
            ("two", 15, 29),
        ]
        return answer


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    folder = tmp_path_factory.mktemp("lan")
    with ExitStack() as stack:
        control, first, second = stack.enter_context(hosts(3))
        tracker = Process(
            ["tracker", "--host", control.address, "--data", str(folder / "tracker"), "--json"],
            folder / "tracker.log",
            prefix=control.prefix,
        )
        stack.callback(tracker.stop)
        made = Lan(control, first, second, tracker, tracker.line(), "", folder, {}, {})
        stack.callback(made.stop)
        made.link = made.invite(uses=2)
        for name, host, layers in (("one", first, "0-14"), ("two", second, "15-29")):
            made.start(name, host, made.link, layers)
        made.ready = {name: process.line() for name, process in made.nodes.items()}
        yield made


@pytest.fixture(scope="module")
def expected(demo: Demo) -> str:
    with demo.client() as client:
        return answer_text(chat(client, "What is the capital of France?"))


def test_machines_of_a_mesh_speak_tls_and_answer_the_same(lan: Lan, expected: str) -> None:
    assert lan.ready["one"]["http_url"] == f"https://{lan.first.address}:7000"
    assert lan.ask()["text"] == expected
    own = [lan.folder / name / "node.json" for name in ("two", "one")]
    mesh = lan.link.split("/")[3].split("?")[0]
    addresses = [f"{lan.first.address}:7001", f"{lan.control.address}:8081"]
    told = json.loads(said(python(lan.second, "-m", "support.intruder", *addresses, *map(str, own), mesh))[0])
    node_id = lan.ready["one"]["node_id"]
    assert told["own"] == f"let in: {node_id}"
    assert told["own hello"] == f"let in by {node_id}"
    for how in ("plain", "plain membership", "foreign", "foreign membership"):
        assert told[how].startswith("UNAVAILABLE"), told
    assert told["stolen hello"].startswith("UNAUTHENTICATED: the certificate on this stream is not"), told
    assert told["stolen join"].startswith("wrong_certificate: "), told


def test_a_node_finds_the_tracker_of_its_network(lan: Lan, tmp_path: Path) -> None:
    alone = ["-m", "meshnet", "node", "--data", str(tmp_path / "found"), "--name", "found", "--no-retry"]
    _, errors = said(python(lan.first, *alone), 2)
    assert f"at https://{lan.control.address}:8080" in errors
    assert "its join token is missing" in errors
    joined = Process(
        # Others always use some of the machine: this one rests as soon as it has looked.
        [*alone[2:], "--port", "7200", "--grpc-port", "7201", "--json", "--when", "idle", "--idle-cpu", "0"],
        tmp_path / "found.log",
        {"MESHNET_JOIN_TOKEN": lan.info["join_token"]},
        prefix=lan.first.prefix,
    )
    try:
        assert joined.line()["http_url"] == f"https://{lan.first.address}:7200"
        assert lan.node("found")["alive"]
        lan.until(lambda: any("rests: other programs use" in p for p in lan.node("found")["problems"]))
    finally:
        joined.stop()


def test_who_must_not_join_is_told_why(lan: Lan, tmp_path: Path) -> None:
    mesh, ca = lan.link.split("/")[3].split("?")[0], lan.link.split("ca=")[1]
    expired = lan.invite(expires_s=1)
    expires = time.monotonic() + 1.0
    fresh = lan.invite()
    at = f"{lan.control.address}:8080"
    imposter = python(lan.second, "-m", "support.imposter", lan.second.address, at, mesh, ca)
    try:
        assert imposter.stdout is not None
        assert "ready" in imposter.stdout.readline()
        wrong = fresh[:-8] + ("0" * 8 if fresh[-8:] != "0" * 8 else "1" * 8)
        tries = {
            "let in 2 of 2 nodes": [lan.link],
            "the join link says": [wrong],
            "does not know the join token": [fresh.replace(at, f"{lan.second.address}:8090")],
            "with another certificate than this mesh's": [fresh.replace(at, f"{lan.second.address}:8080")],
            "leave out --insecure": ["--insecure", "--tracker", f"http://{at}"],
            "has expired": [expired],
        }
        while time.monotonic() < expires:
            time.sleep(0.05)
        started = []
        for words, arguments in tries.items():
            own = ["--port", "0", "--grpc-port", "0", "--no-retry", "--data", str(tmp_path / words[:8])]
            started.append((words, python(lan.first, "-m", "meshnet", "node", *arguments, *own)))
        for words, tried in started:
            out, errors = said(tried, 1)
            last = errors.strip().splitlines()[-1]
            assert last.startswith("meshnet node: "), errors
            assert words in last
            assert fresh.split("token=")[1].split("&")[0] not in out + errors
    finally:
        imposter.kill()
        imposter.communicate()


def test_a_machine_that_slept_and_moved_is_back_with_what_it_had(lan: Lan, expected: str) -> None:
    moved = "10.77.0.33"
    before = lan.node("two")
    lan.nodes["two"].signal(signal.SIGSTOP)
    lan.until(lambda: lan.node("two")["state"] == "lost")
    lan.second.run("ip", "addr", "del", f"{lan.second.address}/24", "dev", "eth0")
    lan.second.run("ip", "addr", "add", f"{moved}/24", "dev", "eth0")
    lan.nodes["two"].signal(signal.SIGCONT)
    # 5 s are promised; three times that is for a machine with other work.
    lan.until(lambda: lan.node("two")["grpc_address"] == f"{moved}:7001", 15.0)
    after = lan.node("two")
    assert after["node_id"] == before["node_id"]
    assert after["served_layers"] == before["served_layers"]
    assert lan.ask()["text"] == expected


def test_a_firewall_is_said_by_name_with_a_remedy(lan: Lan) -> None:
    # As a firewall does that drops what comes in: the answers of these ports go nowhere.
    lan.first.run("ip", "rule", "add", "ipproto", "tcp", "sport", "7100-7101", "blackhole")
    ports = ["--port", "7100", "--grpc-port", "7101"]
    walled = lan.start("walled", lan.first, lan.invite(), "15-29", *ports)

    def problems() -> str:
        return "\n".join(lan.node("walled").get("problems", ()))

    at = f"{lan.first.address}:7101"
    lan.until(lambda: f"the tracker cannot reach walled at {at}: " in problems())
    lan.until(lambda: f"node two cannot reach walled at {at}: " in problems())
    assert "sudo ufw allow 7101/tcp" in problems()
    lan.until(lambda: "cannot reach walled" in walled.log.read_text())
    assert not lan.node("walled")["ready"]
    shown = json.dumps(lan.api("/api/console"))
    assert f"node two cannot reach walled at {at}" in shown
    doctor = ["-m", "meshnet", "doctor", "--json", "--tracker", lan.root]
    examined, _ = python(lan.control, *doctor, MESHNET_API_KEY=lan.info["admin_key"]).communicate(timeout=60)
    findings = [json.loads(line) for line in examined.splitlines()]
    (closed,) = [f for f in findings if f["detail"].startswith(f"the tracker cannot reach walled at {at}: ")]
    assert "sudo ufw allow 7101/tcp" in closed["remedy"]
    (tls,) = [f for f in findings if f["check"] == "tls"]
    assert (tls["state"], lan.link.split("ca=")[1] in tls["detail"]) == ("ok", True)
    lan.first.run("ip", "rule", "del", "ipproto", "tcp", "sport", "7100-7101", "blackhole")
    lan.until(lambda: bool(lan.node("walled")["ready"]))
    lan.until(lambda: "the tracker cannot reach" not in problems())
