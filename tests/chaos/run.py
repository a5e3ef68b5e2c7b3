"""A whole mesh under streams and, unless it is to be calm, in a storm; then what must hold."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
from support.gates import gates
from support.mesh import run_mesh
from support.quad import Quad, figure

from chaos.storm import Storm
from chaos.streams import Asked, Streams

LAYERS = {"low": "0-14", "lower": "0-19", "upper": "10-29", "high": "15-29"}
"""Overlapping shards: each layer has two holders, and some three."""
STREAMS = 8
MORE_BYTES = 96 << 20
MORE_TASKS = 12
"""Growth that is no leak: caches, pools and heaps that have found their size."""
BACK_S = 90.0
LIMITS = {"MESHNET_TRACKER_QUEUE_WAIT_S": "60"}


class Broken(AssertionError):
    """An invariant does not hold; the message says which and where."""


def run(
    seconds: float,
    seed: int,
    *,
    calm: bool = False,
    report_s: float = 60.0,
    say: Callable[[str], None] = print,
) -> None:
    """Raises Broken, and leaves the folder with all logs behind, which the message names."""
    folder = Path(tempfile.mkdtemp(prefix="meshnet-chaos-"))
    say(f"seed {seed}, {seconds:.0f} s, logs in {folder}")
    with run_mesh(folder) as mesh, gates() as links:
        quad = Quad(mesh, links, LAYERS, ("--slots", "8", "--ctx", "640"))
        quad.start(LIMITS)
        _set_price(quad)
        streams = Streams(quad, STREAMS, seed)
        streams.learn()
        quad.settled()
        before = sizes(quad)
        streams.start()
        storm = Storm(quad, seed, say)
        begun = reported = time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            if not calm:
                storm.tick()
            if now >= reported + report_s:
                reported = now
                say(_report(quad, streams, now - begun))
            time.sleep(0.05)
        quad.mend()
        streams.stop()
        quad.settled(BACK_S)
        outcomes = Counter(_outcome(asked) for asked in streams.asked)
        say(f"{len(streams.asked)} calls: {dict(outcomes)}; {dict(storm.counts)}")
        problems = [*streams.problems(), *streams.ledger_problems(streams.asked), *_grown(quad, before)]
        if not outcomes["complete"]:
            problems.append("no call was completed")
    if problems:
        shown = "\n".join(problems[:20])
        raise Broken(f"seed {seed}: {len(problems)} problems (logs in {folder})\n{shown}")


def _set_price(quad: Quad) -> None:
    with quad.mesh.client(admin=True) as client:
        price = {"model": "*", "input": 1_000_000, "output": 3_000_000}
        client.post("/api/prices", json=price).raise_for_status()


def _outcome(asked: Asked) -> str:
    if asked.left:
        return "left"
    return "complete" if asked.heard.error is None else str(asked.heard.error["code"])


@dataclass(frozen=True)
class Size:
    """A process: its resident bytes, the tasks of its event loop, and what it has open."""

    pid: int
    resident: int
    tasks: float
    open: float


def size(quad: Quad, name: str, timeout: float = 30.0) -> Size:
    """Of a node, or of the `tracker`. Raises httpx.HTTPError when it does not answer in time."""
    if name == "tracker":
        assert quad.mesh.tracker is not None
        pid, text = quad.mesh.tracker.pid, quad.tracker_metrics()
        tasks, open_ = figure(text, "meshnet_tasks"), figure(text, "meshnet_calls_in_flight")
    else:
        pid, text = quad.mesh.nodes[name].pid, quad.node_metrics(name, timeout)
        tasks, open_ = figure(text, "meshnet_node_tasks"), figure(text, "meshnet_node_sessions")
    return Size(pid, int(psutil.Process(pid).memory_info().rss), tasks, open_)


def sizes(quad: Quad) -> dict[str, Size]:
    return {name: size(quad, name) for name in ("tracker", *quad.layers)}


def _grown(quad: Quad, before: dict[str, Size]) -> list[str]:
    """Memory and tasks come back to where they were. A node that was started anew has its own beginning."""
    deadline = time.monotonic() + BACK_S
    while True:
        problems: list[str] = []
        for name, now in sizes(quad).items():
            old = before[name]
            if now.tasks > old.tasks + MORE_TASKS:
                problems.append(f"{name} has {now.tasks:.0f} tasks, before {old.tasks:.0f}")
            if now.pid == old.pid and now.resident > old.resident + MORE_BYTES:
                problems.append(f"{name} has {now.resident >> 20} MiB, before {old.resident >> 20}")
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(1.0)


def _report(quad: Quad, streams: Streams, at: float) -> str:
    parts = [f"{at:6.0f} s", f"{len(streams.asked)} calls"]
    for name in ("tracker", *quad.layers):
        try:
            now = size(quad, name, timeout=1.0)
        except (httpx.HTTPError, psutil.NoSuchProcess):
            parts.append(f"{name} is out")
        else:
            parts.append(f"{name} {now.resident >> 20} MiB {now.tasks:.0f} tasks {now.open:.0f} open")
    return "; ".join(parts)
