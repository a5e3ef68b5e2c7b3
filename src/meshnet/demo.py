"""The demo: a tracker and one node per piece as child processes of one supervisor.

The supervisor owns every process it starts: they are told its pid (MESHNET_PARENT_PID) and end when
it is gone, and it stops them, by pid, when it is told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from meshnet.process import PARENT_ENV

STOP_SECONDS = 4.0
"""Children get this long after SIGTERM before SIGKILL; the whole stop stays under 5 s."""
READY_SECONDS = 300.0


class DemoError(Exception):
    """The demo cannot start; the message says why and what helps."""


@dataclass(frozen=True)
class Piece:
    """One node to start: its name and the layers it holds, both ends inclusive."""

    name: str
    first: int
    last: int

    @property
    def layers(self) -> str:
        return f"{self.first}-{self.last}"


def parse_cuts(text: str, n_layers: int) -> tuple[int, ...]:
    """`"10,20"` -> (10, 20): the first layers of the pieces after the first. Empty text: no cut."""
    cuts: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if not part.isdecimal():
            raise DemoError(
                f"--cuts: {part!r} is not a layer number; give for instance --cuts 15 or --cuts auto"
            )
        cut = int(part)
        if not 1 <= cut <= n_layers - 1:
            raise DemoError(
                f"--cuts: {cut} is outside 1..{n_layers - 1}, the borders of a model of {n_layers} layers"
            )
        if cuts and cut <= cuts[-1]:
            raise DemoError(f"--cuts: {cut} does not come after {cuts[-1]}; cuts go upwards, each once")
        cuts.append(cut)
    return tuple(cuts)


def plan_pieces(cuts: Sequence[int], n_layers: int, *, overlap: bool, replicas: int) -> list[Piece]:
    """The nodes to start: one per piece and replica; with `overlap` the last holds the whole model."""
    if replicas < 1:
        raise DemoError(f"--replicas: {replicas} is not at least 1")
    borders = [0, *cuts, n_layers]
    ranges = [(a, b - 1) for a, b in itertools.pairwise(borders)]
    if overlap:
        ranges[-1] = (0, n_layers - 1)
    pieces: list[Piece] = []
    for index, (first, last) in enumerate(ranges, start=1):
        for copy in range(replicas):
            suffix = "" if replicas == 1 else chr(ord("a") + copy) if replicas <= 26 else f"-{copy + 1}"
            pieces.append(Piece(f"node-{index}{suffix}", first, last))
    return pieces


@dataclass
class Child:
    """A process we started, and the one line of JSON that it printed when it was ready."""

    name: str
    process: asyncio.subprocess.Process
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid


class Supervisor:
    """Starts children, waits for their ready lines, and stops them all."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    async def start(self, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> Child:
        """Starts `python -m meshnet ARGUMENTS` and returns when it has printed its ready line."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "meshnet",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env={**os.environ, **env, PARENT_ENV: str(os.getpid())},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor alone
        )
        child = Child(name, process)
        self.children.append(child)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_SECONDS):
                while line := await process.stdout.readline():
                    with contextlib.suppress(json.JSONDecodeError):
                        child.ready = json.loads(line)
                        if isinstance(child.ready, dict):
                            return child
        except TimeoutError:
            raise DemoError(
                f"{name} was not ready within {READY_SECONDS:.0f} s; its log above says more"
            ) from None
        code = await process.wait()
        raise DemoError(f"{name} ended with exit code {code} before it was ready; its message stands above")

    async def stop(self) -> None:
        """SIGTERM to all (nodes first), SIGKILL to what is still there after STOP_SECONDS."""
        alive = [child for child in reversed(self.children) if child.process.returncode is None]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                # A second signal tells a node not to wait for its calls.
                child.process.send_signal(signal.SIGTERM)
        if alive:
            deadline = time.monotonic() + STOP_SECONDS
            waits = [asyncio.ensure_future(child.process.wait()) for child in alive]
            await asyncio.wait(waits, timeout=STOP_SECONDS / 2)
            for child in alive:
                if child.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.send_signal(signal.SIGTERM)
            await asyncio.wait(waits, timeout=max(0.0, deadline - time.monotonic()))
            for child in alive:
                if child.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.kill()
            await asyncio.gather(*waits)
        for child in self.children:
            transport = getattr(child.process, "_transport", None)
            if transport is not None:
                transport.close()


@dataclass(frozen=True)
class DemoOptions:
    """What `meshnet demo` was asked for."""

    model: str
    cuts: str = "15"
    port: int = 8080
    threads: int | None = None
    overlap: bool = False
    replicas: int = 1
    data: Path | None = None
    ctx: int | None = None
    slots: int | None = None
    streams: int = 16
    """What cuts that are left to the demo are to suit."""


async def start_demo(
    options: DemoOptions,
    supervisor: Supervisor,
    data: Path,
    *,
    model_id: str,
    n_layers: int,
    cuts: Sequence[int],
) -> dict[str, Any]:
    """Starts tracker and nodes; returns the values that `--json` prints. Raises DemoError."""
    pieces = plan_pieces(cuts, n_layers, overlap=options.overlap, replicas=options.replicas)
    tracker = await supervisor.start(
        "tracker",
        [
            "tracker",
            "--host",
            "127.0.0.1",
            "--port",
            str(options.port),
            "--grpc-port",
            "0",
            "--data",
            str(data / "tracker"),
            "--new-keys",  # those of an earlier start are stored hashed and cannot be shown again
            "--json",
        ],
        {},
    )
    info = tracker.ready
    base = str(info["base_url"]).removesuffix("/v1")
    threads = (
        options.threads or max(1, len(os.sched_getaffinity(0)) // len(pieces))
        if hasattr(os, "sched_getaffinity")
        else options.threads
    )
    nodes = await asyncio.gather(
        *(
            supervisor.start(
                piece.name,
                _node_arguments(piece, options, base, data, threads, cuts),
                {"MESHNET_JOIN_TOKEN": str(info["join_token"])},
            )
            for piece in pieces
        )
    )
    await _wait_until_routable(base, str(info["admin_key"]), {str(node.ready["node_id"]) for node in nodes})
    return {
        "base_url": info["base_url"],
        "dashboard_url": info["dashboard_url"],
        "api_key": info["api_key"],
        "admin_key": info["admin_key"],
        "join_token": info["join_token"],
        "tracker_pid": tracker.pid,
        "model": model_id,
        "nodes": [
            {
                "node_id": node.ready["node_id"],
                "name": piece.name,
                "layers": [piece.first, piece.last],
                "pid": node.pid,
                "http_url": node.ready["http_url"],
                "grpc_address": node.ready["grpc_address"],
            }
            for piece, node in zip(pieces, nodes, strict=True)
        ],
    }


def _node_arguments(
    piece: Piece, options: DemoOptions, base: str, data: Path, threads: int | None, cuts: Sequence[int]
) -> list[str]:
    arguments = [
        "node",
        "--tracker",
        base,
        "--model",
        options.model,
        "--layers",
        piece.layers,
        "--name",
        piece.name,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--data",
        str(data / piece.name),
        "--json",
    ]
    inside = [str(cut) for cut in cuts if piece.first < cut <= piece.last]
    for flag, value in (
        ("--threads", threads),
        ("--ctx", options.ctx),
        ("--slots", options.slots),
        ("--entry", ",".join(inside)),
    ):
        if value:
            arguments += [flag, str(value)]
    return arguments


async def _wait_until_routable(base: str, admin_key: str, wanted: set[str]) -> None:
    """Waits until the tracker calls all nodes ready and the model complete."""
    deadline = time.monotonic() + READY_SECONDS
    headers = {"Authorization": f"Bearer {admin_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        while True:
            async with session.get(f"{base}/api/nodes") as answer:
                answer.raise_for_status()
                listed = (await answer.json())["nodes"]
            ready = {node["node_id"] for node in listed if node["ready"]}
            async with session.get(f"{base}/readyz") as answer:
                complete = answer.status == 200
            if wanted <= ready and complete:
                return
            if time.monotonic() > deadline:
                raise DemoError(f"nodes {sorted(wanted - ready)} were not ready within {READY_SECONDS:.0f} s")
            await asyncio.sleep(0.1)
