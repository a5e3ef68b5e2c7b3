"""`meshnet config`: the config file, and where each value comes from."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshnet.config import ConfigError, config_path, load_config, option_defaults, origins

config = typer.Typer(no_args_is_help=True)


def command_options(name: str) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Parameter -> (default, environment variables that set it) of one subcommand."""
    from meshnet.cli import ENV_PREFIX, build_app

    group: Any = typer.main.get_command(build_app(name))
    command = group.commands[name]
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for parameter in command.params:
        if parameter.name in (None, "help"):
            continue
        stated = parameter.envvar or ()
        stated = (stated,) if isinstance(stated, str) else tuple(stated)
        automatic = f"{ENV_PREFIX}_{name}_{parameter.name}".upper()
        default = parameter.default
        found[parameter.name] = (None if callable(default) else default, (*stated, automatic))
    return found


@config.command("path")
def path() -> None:
    """Print where the config file is looked for."""
    sys.stdout.write(f"{config_path()}\n")


@config.command("show")
def show(
    command: Annotated[str, typer.Argument(help="tracker, node or demo")] = "node",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per option.")] = False,
) -> None:
    """Say which value each option has without flags, and where it came from."""
    from meshnet.cli import COMMANDS, CONFIGURABLE

    if command not in CONFIGURABLE:
        sys.stderr.write(f"meshnet config: {command!r} takes no config; {', '.join(CONFIGURABLE)} do\n")
        raise typer.Exit(2)
    try:
        tables = load_config(commands=COMMANDS)
        options = command_options(command)
        table = option_defaults(config_path(), command, tables.get(command, {}), options)
    except ConfigError as error:
        sys.stderr.write(f"meshnet config: {error}\n")
        raise typer.Exit(2) from error
    listed = origins(command, options, table, os.environ)
    if as_json:
        for origin in listed:
            value = (
                origin.value
                if isinstance(origin.value, (str, int, float, bool, type(None)))
                else str(origin.value)
            )
            sys.stdout.write(
                json.dumps({"option": origin.option, "value": value, "source": origin.source}) + "\n"
            )
        return
    shown = Table(title=f"meshnet {command}  ({config_path()})", box=None, pad_edge=False)
    for column in ("option", "value", "from"):
        shown.add_column(column)
    for origin in listed:
        value = "" if origin.value is None else str(origin.value)
        shown.add_row("--" + origin.option.replace("_", "-"), value, origin.source)
    Console(highlight=False).print(shown)
