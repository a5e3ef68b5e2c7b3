"""`meshnet service`: keep a tracker or a node running after a restart."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Annotated

import typer

from meshnet.service import Unit, launchd_plist, systemd_unit

service = typer.Typer(no_args_is_help=True)
NAMES = ("tracker", "node")


def _unit(name: str, arguments: list[str]) -> Unit:
    if name not in NAMES:
        sys.stderr.write(f"meshnet service: {name!r} is not one of {', '.join(NAMES)}\n")
        raise typer.Exit(2)
    if sys.platform == "linux":
        return systemd_unit(name, arguments, {})
    if sys.platform == "darwin":
        return launchd_plist(name, arguments, {})
    sys.stderr.write(
        "meshnet service: only systemd (Linux) and launchd (macOS) are known; use your system's own\n"
    )
    raise typer.Exit(1)


@service.command("install", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="tracker or node")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit, write nothing.")] = False,
    start: Annotated[bool, typer.Option(help="Start it at once.")] = True,
) -> None:
    """Write a unit that runs `meshnet NAME ARGUMENTS`, and start it.

    Put secrets such as the join token into the config file, not on this line.
    """
    unit = _unit(name, list(ctx.args))
    if dry_run:
        sys.stdout.write(unit.text)
        return
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    unit.path.write_text(unit.text)
    sys.stdout.write(f"wrote {unit.path}\n")
    if start:
        done = subprocess.run(unit.start, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(f"meshnet service: {shlex.join(unit.start)}: {done.stderr.strip()}\n")
            raise typer.Exit(1)
    sys.stdout.write(f"follow its log with: {shlex.join(unit.follow)}\n")


@service.command("remove")
def remove(name: Annotated[str, typer.Argument(help="tracker or node")]) -> None:
    """Stop the service and delete its unit."""
    unit = _unit(name, [])
    if not unit.path.exists():
        sys.stderr.write(f"meshnet service: there is no {unit.path}\n")
        raise typer.Exit(1)
    subprocess.run(unit.remove, capture_output=True)
    unit.path.unlink()
    sys.stdout.write(f"removed {unit.path}\n")
