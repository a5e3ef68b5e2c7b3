"""`meshnet invite` and `meshnet drain`: bring machines in, and take them out in good order.

Both speak to a running tracker.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated
from urllib.parse import quote

import typer

from meshnet.commands.admin import HERE, Tracker, complaints
from meshnet.tracker.books.client import Api


def invite(
    tracker: Tracker = HERE,
    expires: Annotated[int, typer.Option(min=1, help="Hours until the link expires.")] = 24,
    uses: Annotated[
        int | None, typer.Option(min=1, help="Machines that may join with it; without: any.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the link as one line of JSON.")] = False,
) -> None:
    """Make a link with which another machine joins: `meshnet node LINK`."""
    form = {"expires_s": expires * 3600} | ({} if uses is None else {"uses": uses})
    with complaints("invite"):
        made = Api(tracker, None, "").call("POST", "/api/invite", form)
    if as_json:
        sys.stdout.write(json.dumps(made) + "\n")
        return
    sys.stdout.write(f"{made['join_link']}\n")
    sys.stderr.write("On the other machine: meshnet node LINK\n")


def drain(
    name: Annotated[str, typer.Argument(help="The node's name or id.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let the node take calls again.")] = False,
    tracker: Tracker = HERE,
) -> None:
    """Let a node finish its calls and take no new ones, until --undo."""
    path = f"/api/nodes/{quote(name, safe='')}/drain"
    with complaints("drain"):
        node = Api(tracker, None, "").call("DELETE" if undo else "POST", path, None if undo else {})
    sys.stdout.write(f"{node['name']}: {node['state']}\n")
