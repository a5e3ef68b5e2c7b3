"""The one config file, and where every value of a command comes from.

Precedence: command line, then environment (`MESHNET_<COMMAND>_<OPTION>`, or the shorter name that an
option states), then the config file, then the default. The file is TOML with one table per command:

    [node]
    tracker = "http://192.168.1.10:8080"
    threads = 4
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_ENV = "MESHNET_CONFIG"


class ConfigError(Exception):
    """The config file is refused; the message names the file, the key and the remedy."""


def config_path() -> Path:
    """`$MESHNET_CONFIG`, else config.toml in the platform's folder for configuration."""
    named = os.environ.get(CONFIG_ENV)
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "meshnet" / "config.toml"
    if os.name == "nt":
        return Path(os.environ.get("APPDATA", str(Path.home()))) / "meshnet" / "config.toml"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "meshnet" / "config.toml"


def load_config(path: Path | None = None, *, commands: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The file's tables by command; {} when there is no file. Raises ConfigError."""
    path = path or config_path()
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        if os.environ.get(CONFIG_ENV):
            raise ConfigError(f"{path}: named by {CONFIG_ENV}, but there is no such file") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    known = sorted(commands)
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"{path}: unknown table [{name}]; known are {', '.join(known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, [{name}], not a value")
    return tables


def option_defaults(
    path: Path, command: str, table: Mapping[str, Any], options: Iterable[str]
) -> dict[str, Any]:
    """The table's values by parameter name (`grpc-port` -> `grpc_port`); unknown keys raise ConfigError."""
    known = set(options)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            listed = ", ".join(sorted(option.replace("_", "-") for option in known))
            raise ConfigError(f"{path}: [{command}] has no option {key!r}; it has {listed}")
        values[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    return values


@dataclass(frozen=True)
class Origin:
    """One option's value and where it came from."""

    command: str
    option: str
    value: Any
    source: str
    """`environment NAME`, `config file` or `default`."""


def origins(
    command: str,
    options: Mapping[str, tuple[Any, tuple[str, ...]]],
    table: Mapping[str, Any],
    environment: Mapping[str, str],
) -> list[Origin]:
    """For each option (default, environment names): the value it has when no flag is given."""
    found = []
    for name, (default, variables) in options.items():
        variable = next((v for v in variables if environment.get(v)), None)
        if variable is not None:
            secret = any(word in variable for word in ("TOKEN", "KEY", "SECRET"))
            found.append(
                Origin(
                    command, name, "(secret)" if secret else environment[variable], f"environment {variable}"
                )
            )
        elif name in table:
            found.append(Origin(command, name, table[name], "config file"))
        else:
            found.append(Origin(command, name, default, "default"))
    return found
