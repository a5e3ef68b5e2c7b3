"""A mesh that can be broken: two holders of every layer, each node behind proxies."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2 as httpx

from support.gates import Gates, free_port
from support.mesh import START_SECONDS, Mesh, Process

T = TypeVar("T")
STEADY = {"MESHNET_TRACKER_FLAP_FREE": "100000"}
"""For trackers in tests that break the same nodes again and again on purpose."""
SETTLE_SECONDS = 60.0
ENGINE_THREADS = ("--threads", "1")


@dataclass
class Quad:
    """Nodes of one mesh with their layers. `gates` has `NAME` for a node's data plane, `NAME/http`."""

    mesh: Mesh
    gates: Gates
    layers: dict[str, str]
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    _ports: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)

    def start(self, tracker_env: Mapping[str, str] | None = None) -> None:
        """The tracker and all nodes; returns when all are ready."""
        self.mesh.start_tracker(env={**STEADY, **(tracker_env or {})})
        for name in self.layers:
            self.start_node(name)
        self.mesh.wait_ready(*self.layers)

    def start_node(self, name: str, *arguments: str) -> Process:
        """Starts a node, or starts it again on the same ports, id and proxies. Does not wait."""
        if name not in self._ports:
            http, grpc = free_port(), free_port()
            shown = self.gates.add(f"{name}/http", http), self.gates.add(name, grpc)
            self._ports[name] = (http, grpc, *shown)
        http, grpc, shown_http, shown_grpc = self._ports[name]
        return self.mesh.start_node(
            name,
            self.layers[name],
            *ENGINE_THREADS,
            *("--port", str(http), "--grpc-port", str(grpc)),
            *("--advertise-port", str(shown_http), "--advertise-grpc-port", str(shown_grpc)),
            *self.options,
            *arguments,
            env=self.env,
        )

    # ---------------------------------------------------------------- breaking and mending

    def break_(self, name: str, how: str) -> None:
        """`kill`, `stop`; `cut` or `swallow` both planes of a node, `cut the port` of its data plane alone,
        while its membership stays."""
        if how == "kill":
            self.mesh.nodes[name].kill()
        elif how == "stop":
            self._stopped.add(name)
            self.mesh.nodes[name].signal(signal.SIGSTOP)
        elif how == "cut":
            self.gates.cut(name)
            self.gates.cut(f"{name}/http")
        elif how == "cut the port":
            self.gates.cut(name)
        elif how == "swallow":
            self.gates.set(name, swallow=True)
            self.gates.set(f"{name}/http", swallow=True)
        else:
            raise AssertionError(how)

    def mend_node(self, name: str) -> None:
        """One node as it was: its links whole, woken if it was stopped, started again if it is dead."""
        self.gates.mend(name)
        self.gates.mend(f"{name}/http")
        if name in self._stopped:
            self._stopped.discard(name)
            self.mesh.nodes[name].signal(signal.SIGCONT)
        if self.mesh.nodes[name].popen.poll() is not None:
            self.start_node(name)

    def mend(self, *, timeout: float = START_SECONDS) -> None:
        """Everything as it was, and ready."""
        for name in self.layers:
            self.mend_node(name)
        self.mesh.wait_ready(*self.layers, timeout=timeout)

    # ---------------------------------------------------------------- looking

    def held(self) -> dict[str, float]:
        """What is open on live nodes and at the tracker; empty when nothing is."""
        open_: dict[str, float] = {}
        for name in self.layers:
            if self.mesh.nodes[name].popen.poll() is None and name not in self._stopped:
                text = self.node_metrics(name)
                for gauge in ("sessions", "calls", "waiting_steps", 'slots{state="busy"}', "kept_bytes"):
                    open_[f"{name} {gauge}"] = figure(text, f"meshnet_node_{gauge}")
        text = self.tracker_metrics()
        for gauge in ("calls_in_flight", "calls_waiting"):
            open_[gauge] = figure(text, f"meshnet_{gauge}")
        nodes = {node["name"]: node for node in self.mesh.get("/api/nodes")["nodes"]}
        for line in text.splitlines():
            found = re.match(r'meshnet_free_slots\{model="[^"]*",node="([^"]*)"\} ([0-9.]+)', line)
            if found and found[1] in nodes and nodes[found[1]]["ready"]:
                total = min(shard["n_slots"] for shard in nodes[found[1]]["shards"])
                open_[f"{found[1]} reserved"] = total - float(found[2])
        return {what: value for what, value in open_.items() if value}

    def node_metrics(self, name: str, timeout: float = 30.0) -> str:
        """What a node says of itself, past its proxy."""
        return httpx.get(f"http://127.0.0.1:{self._ports[name][0]}/metrics", timeout=timeout).text

    def tracker_metrics(self) -> str:
        with self.mesh.client(admin=True) as client:
            return client.get("/metrics").text

    def settled(self, timeout: float = SETTLE_SECONDS) -> None:
        """Nothing is held any more, and the ledger holds."""
        deadline = time.monotonic() + timeout
        while held := self.held():
            assert time.monotonic() < deadline, f"still held: {held}"
            time.sleep(0.1)
        report = self.mesh.get("/api/ledger/check")
        assert report["ok"], report

    def call(self, call_id: str) -> dict[str, Any]:
        found = self.mesh.get(f"/api/calls/{call_id}")
        assert isinstance(found, dict)
        return found


def figure(text: str, name: str) -> float:
    """The value of one metric in the text format; 0 where it is not told."""
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] == " ":
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@dataclass
class Heard:
    """One call as its client saw it."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    model: str = ""
    call_id: str = ""
    route: str = ""
    ended: int = 0
    """How often the stream said that it is at its end."""
    retry_after: str = ""
    times: list[float] = field(default_factory=list)
    """When each piece of text came, on the monotonic clock."""
    usage: dict[str, Any] | None = None

    @property
    def nodes(self) -> list[str]:
        """Names of the first route's nodes, head first."""
        return re.findall(r"([^>\[]+)\[", self.route)

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def ask(
    mesh: Mesh,
    prompt: str,
    *,
    stream: bool = True,
    nodes: Sequence[str] = (),
    on_piece: Callable[[int], None] | None = None,
    timeout: float = 240.0,
    key: str = "",
    heard: Heard | None = None,
    **parameters: Any,
) -> Heard:
    """One chat completion, greedy unless told otherwise. `on_piece(n)` runs after the n-th piece of text;
    where it raises, `heard` has what came until then."""
    headers = {"Authorization": f"Bearer {key or mesh.info['admin_key']}"}
    if nodes:
        headers["X-Meshnet-Nodes"] = ",".join(nodes)
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": stream,
        **parameters,
    }
    heard = heard or Heard()
    with (
        httpx.Client(base_url=mesh.root, headers=headers, timeout=timeout) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        heard.status = answer.status_code
        heard.call_id = answer.headers.get("x-meshnet-call", "")
        heard.route = answer.headers.get("x-meshnet-route", "")
        heard.retry_after = answer.headers.get("retry-after", "")
        if not stream or answer.status_code != 200:
            answer.read()
            _take_whole(heard, answer.json())
            return heard
        pieces = 0
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                heard.ended += 1
                continue
            value = json.loads(line[6:])
            if "error" in value:
                heard.error = value["error"]
                continue
            heard.model = value["model"]
            for choice in value["choices"]:
                piece = choice["delta"].get("content") or ""
                heard.finish = choice["finish_reason"] or heard.finish
                if piece:
                    heard.text += piece
                    heard.times.append(time.monotonic())
                    pieces += 1
                    if on_piece is not None:
                        on_piece(pieces)
    return heard


def _take_whole(heard: Heard, body: dict[str, Any]) -> None:
    if "error" in body:
        heard.error = body["error"]
        return
    heard.ended = 1
    heard.model = body["model"]
    heard.usage = body["usage"]
    choice = body["choices"][0]
    heard.text, heard.finish = choice["message"]["content"], choice["finish_reason"]


def wait_for(look: Callable[[], T | None], timeout: float = SETTLE_SECONDS) -> T:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + timeout
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
    return found


class Asking(threading.Thread):
    """A call on its own thread; `result()` waits for it."""

    def __init__(self, mesh: Mesh, prompt: str, **parameters: Any) -> None:
        super().__init__(daemon=True)
        self._asked = (mesh, prompt, parameters)
        self._heard: Heard | None = None
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            mesh, prompt, parameters = self._asked
            self._heard = ask(mesh, prompt, **parameters)
        except BaseException as failure:
            self._failure = failure

    def result(self, timeout: float = 240.0) -> Heard:
        self.join(timeout)
        assert not self.is_alive(), "the call has not ended"
        if self._failure is not None:
            raise self._failure
        assert self._heard is not None
        return self._heard
