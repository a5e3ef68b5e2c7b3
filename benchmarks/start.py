"""From the command to ready: a node that joins a tracker, and the whole demo."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from figures import Spread, Table, parser
from stand import MODEL
from support.mesh import run_demo, run_mesh


def node_seconds(folder: Path, layers: str) -> float:
    """Of one node, from its start until the tracker routes over it; the tracker runs already."""
    with run_mesh(folder, model=MODEL) as running:
        running.start_tracker()
        begun = time.perf_counter()
        running.start_node("node", layers)
        running.wait_ready()
        return time.perf_counter() - begun


def demo_seconds(folder: Path) -> float:
    """Of the demo, until its endpoint answers over both nodes."""
    begun = time.perf_counter()
    with run_demo(folder, "--cuts", "15"):
        return time.perf_counter() - begun


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    chosen = options.parse_args()
    table = Table("Start, seconds to ready", ["", "seconds"])
    found: dict[str, list[float]] = {}
    for _ in range(chosen.repeats):
        for what, layers in (("node, whole model", "0-29"), ("node, layers 0-14", "0-14"), ("demo", "")):
            with tempfile.TemporaryDirectory() as name:
                seconds = node_seconds(Path(name), layers) if layers else demo_seconds(Path(name))
            found.setdefault(what, []).append(seconds)
    for what, values in found.items():
        table.add(what, Spread.of(values).text(1))
    table.publish("start", keep=chosen.keep)


if __name__ == "__main__":
    main()
