"""A machine that joins with a link, from the command to serving, beside a plain copy of the same bytes.

The model lies at a neighbour that holds its first half; the second half and the output matrix go to the new
node, with the layers that it had better take over. Each node computes on a core of its own. The copy is of as
many bytes as the new node's shard has, from Python's own HTTP server to a file. Both go over a line of the
same rate, and over an unlimited one. Wanted: at most 1.3 times the copy, and 5 s. And how long placing takes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from figures import Spread, Table, parser, ratios
from stand import MODEL, free_port, two_cores
from support.gates import Gates, gates
from support.mesh import Mesh, Process, run_mesh

from meshnet.models.gguf import ModelFile
from meshnet.models.slice import plan_slice
from meshnet.models.store import Store
from meshnet.routing.placement import ModelLayers, PlacementNode, place

FIRST = 15
LIMIT_S = 5.0
FACTOR = 1.3
PLACING_LIMIT_MS = 1000.0


def joining(folder: Path, lines: Gates, rate: float, model: ModelFile) -> tuple[float, int]:
    """Seconds from `meshnet node JOIN-LINK` until the tracker routes over the node; its shard's bytes."""
    with run_mesh(folder, model=MODEL) as mesh:
        mesh.start_tracker(env={"MESHNET_CACHE": str(folder / "tracker-cache")})
        port = free_port()
        shown = lines.add("neighbour", port)
        a, b = two_cores()
        ports = ("--port", str(port), "--advertise-port", str(shown))
        mesh.start_node("neighbour", f"0-{FIRST - 1}", *ports, "--cores", a)
        mesh.wait_ready("neighbour")
        lines.set("neighbour", bytes_per_s=rate)
        with mesh.client(admin=True) as client:
            link = client.post("/api/invite", json={}).json()["join_link"]
        begun = time.perf_counter()
        joined = Process(
            [
                *("node", link, "--name", "new", "--cores", b),
                *("--port", "0", "--grpc-port", "0", "--data", str(folder / "new")),
            ],
            folder / "new.log",
            {"MESHNET_CACHE": str(folder / "new-cache")},
        )
        try:
            _wait_complete(mesh)
            seconds = time.perf_counter() - begun
            with mesh.client(admin=True) as client:
                nodes = client.get("/api/nodes").json()["nodes"]
            ((first, last),) = next(node["served_layers"] for node in nodes if node["name"] == "new")
            return seconds, plan_slice(model, first, last).copy_bytes
        finally:
            joined.stop()


def _wait_complete(mesh: Mesh) -> None:
    deadline = time.monotonic() + 120
    with mesh.client() as client:
        while client.get("/readyz").status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError("the new node does not serve")
            time.sleep(0.02)


def copy_seconds(folder: Path, lines: Gates, rate: float, size: int) -> float:
    """As many bytes by `python -m http.server`, to a file."""
    served = folder / "served"
    served.mkdir()
    (served / "bytes").write_bytes(random.Random(1).randbytes(size))
    port = free_port()
    shown = lines.add("copy", port)
    command = [
        sys.executable,
        "-m",
        "http.server",
        str(port),
        "--bind",
        "127.0.0.1",
        "--directory",
        str(served),
    ]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, cwd=served, stdout=quiet, stderr=quiet)
    try:
        _wait_open(port)
        lines.set("copy", bytes_per_s=rate)
        begun = time.perf_counter()
        with (
            urllib.request.urlopen(f"http://127.0.0.1:{shown}/bytes") as answer,
            (folder / "copy").open("wb") as out,
        ):
            shutil.copyfileobj(answer, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        return time.perf_counter() - begun
    finally:
        server.terminate()
        server.wait()


def _wait_open(port: int) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError("the plain server does not answer")


def placing_ms(nodes: int, layers: int) -> float:
    """`place` over nodes of many sizes, milliseconds of processor time."""
    rng = random.Random(nodes)
    weight = ModelLayers((500_000_000,) * layers, 10**9, 10**9, output_work=2.0)
    some = [
        PlacementNode(f"node-{k:03}", rng.randrange(4, 40) * 10**9, rng.uniform(0.2, 3)) for k in range(nodes)
    ]
    begun = time.thread_time()
    place(weight, some)
    return (time.thread_time() - begun) * 1e3


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options.add_argument(
        "--rates", type=float, nargs="+", default=[0, 12.5e6], help="bytes per second; 0: all"
    )
    chosen = options.parse_args()
    store = Store()
    model = ModelFile.open(store.pull(MODEL).path)
    table = Table(
        "Joining: a shard from a neighbour, seconds",
        [
            *("line", "shard, MB", "join to serving", "plain copy"),
            *(f"over {FACTOR:g} x copy", f"wanted: at most {LIMIT_S:g}"),
        ],
    )
    for rate in chosen.rates:
        joins, copies, sizes = [], [], []
        for _ in range(chosen.repeats):
            with tempfile.TemporaryDirectory() as name, gates() as lines:
                seconds, size = joining(Path(name), lines, rate, model)
                joins.append(seconds)
                sizes.append(size / 1e6)
                copies.append(copy_seconds(Path(name), lines, rate, size))
        over = Spread.of(join - FACTOR * copy for join, copy in zip(joins, copies, strict=True))
        line = f"{rate * 8 / 1e6:g} Mbit/s" if rate else "unlimited"
        verdict = "met" if over.median <= LIMIT_S else "MISSED"
        table.add(
            line,
            Spread.of(sizes).text(0),
            Spread.of(joins).text(),
            Spread.of(copies).text(),
            over.text(),
            verdict,
        )
        table.notes.append(f"{line}: joining takes {ratios(joins, copies).text(1)} times the copy")
    placing = Spread.of(placing_ms(100, 80) for _ in range(chosen.repeats))
    verdict = "met" if placing.median <= PLACING_LIMIT_MS else "MISSED"
    wanted = f"wanted: at most {PLACING_LIMIT_MS:g} ({verdict})"
    table.notes.append(f"placing 80 layers over 100 nodes: {placing.text(0)} ms; {wanted}")
    table.publish("joining", keep=chosen.keep)


if __name__ == "__main__":
    main()
