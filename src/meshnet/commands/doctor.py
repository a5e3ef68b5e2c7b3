"""`meshnet doctor`: what is wrong here, and what helps."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from meshnet.doctor import examine
from meshnet.models.store import default_root

MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]FAIL[/red]"}


def doctor(
    tracker: Annotated[str | None, typer.Option(help="Also check the way to this tracker.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per finding.")] = False,
) -> None:
    """Check the engine, CPU, memory, disk, ports and the way to a tracker; exit code 1 when one fails."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    for finding in examine(cache=default_root(), tracker=tracker):
        failed |= finding.state == "fail"
        if as_json:
            sys.stdout.write(json.dumps(asdict(finding)) + "\n")
            continue
        console.print(f"{MARKS[finding.state]}  {finding.check}: {finding.detail}")
        if finding.remedy:
            console.print(f"      -> {finding.remedy}")
    raise typer.Exit(1 if failed else 0)
