"""Real processes for tests: the demo as a user starts it, and trackers and nodes one by one."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

START_SECONDS = 120.0
STOP_SECONDS = 15.0
"""Three times the 5 s within which everything of ours must stop."""


class Process:
    """`python -m meshnet ARGUMENTS` with its ready line; its stderr goes to a log file."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._log_file = log.open("ab")
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-m", "meshnet", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            env={**os.environ, "MESHNET_PARENT_PID": str(os.getpid()), **(env or {})},
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def line(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The next line of stdout as JSON. Fails with the log when the process ends first."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no line within {timeout:.0f} s; log:\n{self.tail()}") from None
        if line is None:
            raise AssertionError(f"ended with {self.popen.wait()} before it was ready; log:\n{self.tail()}")
        value = json.loads(line)
        assert isinstance(value, dict)
        return value

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: int) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits."""
        self.signal(signal.SIGKILL)
        self._finish(5.0)

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """SIGTERM, and waits; a stopped process is woken first."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return self._finish(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"did not stop within {timeout:.0f} s of SIGTERM; log:\n{self.tail()}"
            ) from None

    def _finish(self, timeout: float) -> int:
        code = self.popen.wait(timeout)
        self._reader.join(timeout=5.0)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self._log_file.close()
        return code


@dataclass
class Demo:
    """A running `meshnet demo`, with the values of its one JSON line."""

    process: Process
    info: dict[str, Any]

    @property
    def base_url(self) -> str:
        return str(self.info["base_url"])

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    @property
    def dashboard_url(self) -> str:
        return str(self.info["dashboard_url"])

    @property
    def api_key(self) -> str:
        return str(self.info["api_key"])

    @property
    def admin_key(self) -> str:
        return str(self.info["admin_key"])

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(self.info["nodes"])

    def client(self, *, admin: bool = False, timeout: float = 60.0) -> httpx.Client:
        key = self.admin_key if admin else self.api_key
        return httpx.Client(base_url=self.root, headers={"Authorization": f"Bearer {key}"}, timeout=timeout)

    def get(self, path: str, *, admin: bool = True) -> Any:
        with self.client(admin=admin) as client:
            answer = client.get(path)
            answer.raise_for_status()
            return answer.json()


@contextmanager
def run_demo(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Demo]:
    """Starts `meshnet demo --json --port 0 ARGUMENTS`, stops it at the end and checks that it stopped."""
    process = Process(["demo", "--json", "--port", "0", *arguments], folder / "demo.log", env)
    try:
        yield Demo(process, process.line())
    finally:
        process.stop()


@dataclass
class Mesh:
    """A tracker and nodes that a test starts, kills and restarts one by one."""

    folder: Path
    model: str = "smollm2"
    tracker: Process | None = None
    info: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Process] = field(default_factory=dict)
    ready: dict[str, dict[str, Any]] = field(default_factory=dict)
    _spent: list[Process] = field(default_factory=list)

    @property
    def root(self) -> str:
        return str(self.info["base_url"]).removesuffix("/v1")

    def start_tracker(self, *arguments: str, port: int = 0, env: Mapping[str, str] | None = None) -> None:
        """Starts the tracker; after a kill the same ports and data are used again."""
        ports = ["--port", str(port), "--grpc-port", "0"]
        if self.info:
            ports = [
                "--port",
                self.root.rsplit(":", 1)[1],
                "--grpc-port",
                self.info["grpc_address"].rsplit(":", 1)[1],
            ]
        self.tracker = Process(
            [
                "tracker",
                "--host",
                "127.0.0.1",
                *ports,
                "--data",
                str(self.folder / "tracker"),
                "--json",
                *arguments,
            ],
            self.folder / "tracker.log",
            env,
        )
        self._spent.append(self.tracker)
        self.info = {**self.info, **self.tracker.line()}

    def start_node(
        self, name: str, layers: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> Process:
        """Starts a node; does not wait for it. Its data folder is kept over a restart."""
        process = Process(
            [
                "node",
                "--tracker",
                self.root,
                "--model",
                self.model,
                "--layers",
                layers,
                "--name",
                name,
                "--port",
                "0",
                "--grpc-port",
                "0",
                "--data",
                str(self.folder / name),
                "--json",
                *arguments,
            ],
            self.folder / f"{name}.log",
            {"MESHNET_JOIN_TOKEN": str(self.info["join_token"]), **(env or {})},
        )
        self.nodes[name] = process
        self._spent.append(process)
        return process

    def wait_ready(self, *names: str, timeout: float = START_SECONDS) -> None:
        """Waits for the ready lines and until the tracker routes over these nodes (default: all)."""
        wanted = names or tuple(self.nodes)
        for name in wanted:
            if name not in self.ready or self.ready[name].get("pid") != self.nodes[name].pid:
                self.ready[name] = {**self.nodes[name].line(timeout), "pid": self.nodes[name].pid}
        deadline = time.monotonic() + timeout
        with self.client(admin=True) as client:
            while True:
                listed = client.get("/api/nodes").json()["nodes"]
                if set(wanted) <= {node["name"] for node in listed if node["ready"]}:
                    return
                assert time.monotonic() < deadline, f"not ready: {wanted} in {listed}"
                time.sleep(0.05)

    def client(self, *, admin: bool = False, timeout: float = 60.0) -> httpx.Client:
        key = self.info["admin_key" if admin else "api_key"]
        return httpx.Client(base_url=self.root, headers={"Authorization": f"Bearer {key}"}, timeout=timeout)

    def get(self, path: str) -> Any:
        with self.client(admin=True) as client:
            answer = client.get(path)
            answer.raise_for_status()
            return answer.json()

    def stop(self) -> None:
        """Stops all that was started; nodes first."""
        alive = [process for process in reversed(self._spent) if process.popen.poll() is None]
        for process in alive:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        for process in reversed(self._spent):
            process.stop()


@contextmanager
def run_mesh(folder: Path, *, model: str = "smollm2") -> Iterator[Mesh]:
    """A mesh whose processes all end with the block."""
    mesh = Mesh(folder, model)
    try:
        yield mesh
    finally:
        mesh.stop()


def chat(
    client: httpx.Client,
    text: str,
    *,
    stream: bool = False,
    headers: Mapping[str, str] | None = None,
    **parameters: Any,
) -> httpx.Response:
    """One greedy chat completion, unless `parameters` say otherwise."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": stream,
        **parameters,
    }
    return client.post("/v1/chat/completions", json=body, headers=dict(headers or {}))


def answer_text(response: httpx.Response) -> str:
    """The text of a completed answer; fails with the body of an error."""
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])
