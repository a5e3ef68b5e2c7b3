"""`meshnet drain`: takes a node out of use in good order, and back. Speaks to a running tracker."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import quote

import typer

from meshnet.tracker.books.client import Api, Failed

Tracker = Annotated[
    str, typer.Option("--tracker", help="URL of the tracker; its admin key in MESHNET_API_KEY.")
]


def drain(
    name: Annotated[str, typer.Argument(help="The node's name or id.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let the node take calls again.")] = False,
    tracker: Tracker = "http://127.0.0.1:8080",
) -> None:
    """Let a node finish its calls and take no new ones, until --undo."""
    path = f"/api/nodes/{quote(name, safe='')}/drain"
    try:
        node = Api(tracker, None, "").call("DELETE" if undo else "POST", path, None if undo else {})
    except Failed as error:
        sys.stderr.write(f"meshnet drain: {error}\n")
        raise typer.Exit(1) from error
    sys.stdout.write(f"{node['name']}: {node['state']}\n")
