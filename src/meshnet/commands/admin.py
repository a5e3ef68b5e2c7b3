"""What commands share that speak to a running tracker with an admin key."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from meshnet.tracker.books.client import Failed

Tracker = Annotated[
    str, typer.Option("--tracker", help="URL of the tracker; its admin key in MESHNET_API_KEY.")
]
HERE = "http://127.0.0.1:8080"


@contextmanager
def complaints(command: str) -> Iterator[None]:
    """What the tracker refuses ends the command with one line on stderr and exit code 1."""
    try:
        yield
    except Failed as error:
        sys.stderr.write(f"meshnet {command}: {error}\n")
        raise typer.Exit(1) from error
