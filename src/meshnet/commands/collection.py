"""`meshnet model load`, `unload`, `default`, `alias`: what a running mesh serves, and under which names."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from meshnet.commands.admin import HERE, Tracker, complaints
from meshnet.tracker.books.client import Api

POLL_S = 0.5


def load(
    what: Annotated[
        str,
        typer.Argument(help="Model id, hf:ORG/REPO/FILE.gguf, or a path on the tracker's machine."),
    ],
    tracker: Tracker = HERE,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until it is served.")] = False,
) -> None:
    """Have the mesh serve a model: the tracker places it on nodes that were started without --layers."""
    with complaints("model"):
        api = Api(tracker, None, "")
        name = api.call("POST", "/api/models", {"model": what})["id"]
        if no_wait:
            sys.stdout.write(f"{name}: asked for\n")
            return
        shown = ""
        while True:
            found = _find(api.call("GET", "/api/placement"), str(name))
            line = _line(found)
            if line != shown:
                shown = line
                sys.stderr.write(f"{line}\n")
            if found["state"] == "ready":
                sys.stdout.write(f"{found['id']}: ready\n")
                return
            if found["state"] in ("failed", "waiting", "evicted", "off"):
                sys.stderr.write(f"meshnet model: {found['reason']}\n")
                raise typer.Exit(1)
            time.sleep(POLL_S)


def _find(placement: dict[str, Any], name: str) -> dict[str, Any]:
    """The model's entry; what was asked for may have led to another id meanwhile."""
    models = {each["id"]: each for each in placement["models"]}
    found = models.get(placement["names"].get(name, name))
    return dict(found or {"id": name, "state": "placing", "progress": 0.0, "reason": None})


def _line(found: dict[str, Any]) -> str:
    share = f" {found['progress']:.0%}" if found["state"] in ("reading", "loading") else ""
    return f"{found['id']}: {found['state']}{share}"


def unload(
    name: Annotated[str, typer.Argument(help="Model id or alias.")],
    tracker: Tracker = HERE,
) -> None:
    """Let go of a model: nodes finish its calls, then free its layers."""
    with complaints("model"):
        done = Api(tracker, None, "").call("DELETE", f"/api/models/{quote(name, safe='')}")
    sys.stdout.write(f"{done['id']}: let go\n")
    if done["held_by"]:
        nodes = ", ".join(done["held_by"])
        sys.stderr.write(f"started with layers of their own, never moved: {nodes}; stop them to free it\n")


def default(
    name: Annotated[str, typer.Argument(help="Model id or alias; empty: the first that is complete.")] = "",
    tracker: Tracker = HERE,
) -> None:
    """Choose the model that clients without a wish get."""
    with complaints("model"):
        done = Api(tracker, None, "").call("PUT", "/api/models/default", {"model": name} if name else {})
    sys.stdout.write(f"default: {done['default'] or 'none'}\n")


def alias(
    name: Annotated[str, typer.Argument(help="The further name.")],
    to: Annotated[str, typer.Argument(metavar="[MODEL]", help="The model that it leads to.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Forget the name.")] = False,
    tracker: Tracker = HERE,
) -> None:
    """Give a model a further name that requests may use, or forget one."""
    if bool(to) == remove:
        sys.stderr.write("meshnet model: give the model that the name leads to, or --remove\n")
        raise typer.Exit(2)
    path = f"/api/models/aliases/{quote(name, safe='')}"
    with complaints("model"):
        api = Api(tracker, None, "")
        done = api.call("DELETE", path) if remove else api.call("PUT", path, {"model": to})
    sys.stdout.write(f"{done['alias']}: {done['model'] or 'forgotten'}\n")
