"""The `meshnet` command. Only the module of the subcommand that runs is imported: nodes start lean."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import typer

from meshnet import __version__


class Command(NamedTuple):
    """Where a subcommand lives: a function or a typer app in a module of `meshnet.commands`."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Command] = {
    "demo": Command("demo", "demo", "Start a tracker and nodes on this machine."),
    "tracker": Command("tracker", "tracker", "Run the tracker: endpoint, dashboard, planning, ledger."),
    "node": Command("node", "node", "Run a node: hold layers of a model and compute them."),
    "model": Command("model", "model", "Bring, list, slice and check models."),
    "route": Command("route", "route", "Show which route a call would take, and why."),
    "account": Command("books", "account", "Accounts and their balances."),
    "key": Command("books", "key", "API keys: make, list, limit, revoke."),
    "price": Command("books", "price", "Prices per model."),
    "ledger": Command("books", "ledger", "Check, refund, export the ledger."),
    "data": Command("books", "data", "Back up and restore the tracker's data."),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"meshnet {__version__}\n")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
    ),
) -> None:
    """One large language model, spread over the machines you already own."""


def _listed_only() -> None:
    """Stands for a subcommand in the help; the one that runs is registered for real."""


def build_app(wanted: str | None) -> typer.Typer:
    """The command with `wanted` registered for real and every other subcommand by its help alone."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
    app.callback()(_root)
    for name, entry in COMMANDS.items():
        if name != wanted:
            app.command(name, help=entry.help)(_listed_only)
            continue
        target = getattr(importlib.import_module(f"meshnet.commands.{entry.module}"), entry.attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=entry.help)
        else:
            app.command(name)(target)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wanted = next((argument for argument in given if not argument.startswith("-")), None)
    build_app(wanted)(given, prog_name="meshnet")
