"""The `meshnet` command. Only the module of the subcommand that runs is imported: nodes start lean."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer

from meshnet import __version__
from meshnet.config import ConfigError, config_path, load_config, option_defaults


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
    "drain": Command("mesh", "drain", "Let a node finish its calls and take no new ones."),
    "place": Command("place", "place", "Show which node should hold which layers, and why."),
    "invite": Command("mesh", "invite", "Make a link with which another machine joins."),
    "route": Command("route", "route", "Show which route a call would take, and why."),
    "account": Command("books", "account", "Accounts and their balances."),
    "key": Command("books", "key", "API keys: make, list, limit, revoke."),
    "price": Command("books", "price", "Prices per model."),
    "ledger": Command("books", "ledger", "Check, refund, export the ledger."),
    "data": Command("books", "data", "Back up and restore the tracker's data."),
    "doctor": Command("doctor", "doctor", "Check this machine, with a remedy per finding."),
    "service": Command("service", "service", "Keep a tracker or a node running (systemd, launchd)."),
    "config": Command("config", "config", "Show the config file and where each value comes from."),
}
ALIASES: dict[tuple[str, str], str] = {("node", "drain"): "drain"}
"""Two words that stand for one subcommand, where people would look for it."""
CONFIGURABLE = ("demo", "tracker", "node")
"""Subcommands whose options the config file may set."""
ENV_PREFIX = "MESHNET"


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"meshnet {__version__}\n")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version,
        allow_from_autoenv=False,
        help="Print the version and exit.",
    ),
) -> None:
    """One large language model, spread over the machines you already own."""


def _listed_only() -> None:
    """Stands for a subcommand in the help; the one that runs is registered for real."""


def build_app(wanted: str | None) -> typer.Typer:
    """The command with `wanted` registered for real and every other subcommand by its help alone."""
    app = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
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


def _defaults(wanted: str | None) -> dict[str, Any]:
    """The config file's values for the subcommand that runs. Raises ConfigError."""
    if wanted not in CONFIGURABLE:
        return {}
    table = load_config(commands=COMMANDS).get(wanted, {})
    if not table:
        return {}
    from meshnet.commands.config import command_options

    return {wanted: option_defaults(config_path(), wanted, table, command_options(wanted))}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    # Its remarks on handshakes that failed say nothing that our own log does not.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if alias := ALIASES.get((given[0], given[1]) if len(given) > 1 else ("", "")):
        given[:2] = [alias]
    wanted = next((argument for argument in given if not argument.startswith("-")), None)
    try:
        defaults = _defaults(wanted)
    except ConfigError as error:
        sys.stderr.write(f"meshnet: {error}\n")
        raise SystemExit(2) from error
    build_app(wanted)(given, prog_name="meshnet", default_map=defaults, auto_envvar_prefix=ENV_PREFIX)
