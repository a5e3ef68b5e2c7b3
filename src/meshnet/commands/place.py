"""`meshnet place`: which node should hold which layers of a model, and why; on request, done anew."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from meshnet.commands.admin import HERE, Tracker, complaints
from meshnet.commands.model import Objective
from meshnet.tracker.books.client import Api


def place(
    model: Annotated[str, typer.Option(help="Model id or alias (default: the mesh's default).")] = "",
    explain: Annotated[bool, typer.Option("--explain", help="Say why, in sentences.")] = False,
    objective: Annotated[
        Objective, typer.Option(help="throughput: many streams; latency: one stream.")
    ] = Objective.throughput,
    holders: Annotated[int, typer.Option(min=1, max=64, help="Nodes that should hold each layer.")] = 1,
    apply: Annotated[
        bool, typer.Option("--apply", help="Have it placed anew, on the nodes that the tracker may move.")
    ] = False,
    tracker: Tracker = HERE,
    as_json: Annotated[bool, typer.Option("--json", help="Print as one line of JSON.")] = False,
) -> None:
    """Show which node should hold which layers; nothing is moved without --apply."""
    if apply and (objective is not Objective.throughput or holders != 1):
        sys.stderr.write(
            "meshnet place: --apply goes by the tracker's own rule (throughput first, replicas last); "
            "leave out --objective and --holders\n"
        )
        raise typer.Exit(2)
    form: dict[str, Any] = {"objective": objective.value, "holders": holders}
    form |= {"model": model} if model else {}
    with complaints("place"):
        api = Api(tracker, None, "")
        found = api.call("POST", "/api/place/preview", form)
        names = {node["node_id"]: node["name"] for node in api.call("GET", "/api/nodes")["nodes"]}
        if apply:
            api.call("POST", "/api/placement", {"model": found["model"]})
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for node_id, ranges in found["shards"].items():
        layers = ", ".join(f"{first}-{last}" for first, last in ranges)
        new = ", ".join(f"{first}-{last}" for first, last in found["loads"].get(node_id, ()))
        gone = ", ".join(f"{first}-{last}" for first, last in found["drops"].get(node_id, ()))
        change = "".join([f"; to load: {new}" if new else "", f"; to let go: {gone}" if gone else ""])
        sys.stdout.write(f"{names.get(node_id, node_id)}: layers {layers}{change}\n")
    if explain:
        for line in found["why"]:
            for node_id, name in names.items():
                line = line.replace(node_id, name)
            sys.stdout.write(f"  {line}\n")
