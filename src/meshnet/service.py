"""Units that keep a tracker or a node running: systemd (user) on Linux, launchd on macOS."""

from __future__ import annotations

import os
import plistlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LABEL = "net.meshnet"


@dataclass(frozen=True)
class Unit:
    """A file to write and the commands that start, follow and remove the service."""

    path: Path
    text: str
    start: tuple[str, ...]
    follow: tuple[str, ...]
    remove: tuple[str, ...]


def systemd_unit(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Unit:
    """A user unit: restarts on failure, stops within the node's drain time."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config")))
    lines = [
        "[Unit]",
        f"Description=meshnet {name}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "ExecStart=" + " ".join(_quote(part) for part in (sys.executable, "-m", "meshnet", name, *arguments)),
        *(f"Environment={_quote(f'{key}={value}')}" for key, value in environment.items()),
        "Restart=on-failure",
        "RestartSec=2",
        "TimeoutStopSec=60",
        "NoNewPrivileges=true",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    unit = f"meshnet-{name}.service"
    return Unit(
        base / "systemd" / "user" / unit,
        "\n".join(lines),
        ("systemctl", "--user", "enable", "--now", unit),
        ("journalctl", "--user", "-fu", unit),
        ("systemctl", "--user", "disable", "--now", unit),
    )


def launchd_plist(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Unit:
    """A launch agent of the user; its log lies in ~/Library/Logs."""
    label = f"{LABEL}.{name}"
    path = Path.home() / "Library" / "LaunchAgents" / f"{label}.plist"
    log = str(Path.home() / "Library" / "Logs" / f"meshnet-{name}.log")
    text = plistlib.dumps(
        {
            "Label": label,
            "ProgramArguments": [sys.executable, "-m", "meshnet", name, *arguments],
            "EnvironmentVariables": dict(environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "StandardErrorPath": log,
            "StandardOutPath": log,
        }
    ).decode()
    return Unit(
        path,
        text,
        ("launchctl", "load", "-w", str(path)),
        ("tail", "-f", log),
        ("launchctl", "unload", "-w", str(path)),
    )


def _quote(part: str) -> str:
    """systemd's quoting: double quotes, with backslashes and percent signs doubled."""
    escaped = part.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if not part or any(c in part for c in " \t\"'\\;") else escaped
