"""`--when idle`: a node that rests while its owner needs the machine, and while it runs on battery.

What others compute counts, not the node's own work: the machine's busy cores less those of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

LOOK_S = 2.0
WEIGHT = 0.5
"""Of the newest look in the average: one short burst is not use."""
SUPPLIES = Path("/sys/class/power_supply")


@dataclass(frozen=True, slots=True)
class Use:
    """One look at the machine. `others`: fraction of all cores that other programs keep busy, 0 to 1."""

    others: float
    on_battery: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """`others`: above it the machine is in use. `calm_s`: so long it must be idle before the node works."""

    others: float = 0.25
    calm_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Rest:
    """`why` is empty while the node works. `calm_since`: since when nobody has used the machine."""

    why: str = ""
    average: float = 0.0
    calm_since: float | None = None


def decide(rest: Rest, use: Use, now: float, limits: Limits) -> Rest:
    """Rests at once when there is a reason, and works again once there was none for `calm_s`."""
    average = rest.average + WEIGHT * (use.others - rest.average)
    reason = ""
    if use.on_battery:
        reason = "the machine runs on battery"
    elif average > limits.others:
        reason = f"other programs use {average:.0%} of the machine (limit {limits.others:.0%})"
    if reason:
        return Rest(reason, average, None)
    if not rest.why:
        return replace(rest, average=average)
    since = now if rest.calm_since is None else rest.calm_since
    return Rest("" if now - since >= limits.calm_s else rest.why, average, since)


def on_battery(supplies: Path = SUPPLIES) -> bool:
    """True when a battery is there and no mains supply is online. Linux; elsewhere what psutil knows."""
    kinds: dict[str, bool] = {}
    try:
        for supply in sorted(supplies.iterdir()):
            kind = (supply / "type").read_text().strip()
            if kind == "Battery":
                # A mouse's battery says nothing of the machine.
                scope = supply / "scope"
                if not scope.exists() or scope.read_text().strip() != "Device":
                    status = (supply / "status").read_text().strip()
                    kinds["battery"] = kinds.get("battery", False) or status == "Discharging"
            else:
                online = supply / "online"
                kinds["mains"] = kinds.get("mains", False) or (
                    online.exists() and online.read_text().strip() == "1"
                )
    except OSError:
        return _battery_elsewhere() if not supplies.exists() else False
    return kinds.get("battery", False) and not kinds.get("mains", False)


def _battery_elsewhere() -> bool:
    sensors = getattr(psutil, "sensors_battery", None)
    if sensors is None:
        return False
    try:
        battery = sensors()
    except (OSError, RuntimeError):
        return False
    return battery is not None and battery.power_plugged is False


class Watch:
    """Looks at the machine. The first look after the start says nothing of the processor yet."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._cores = psutil.cpu_count() or 1
        psutil.cpu_percent(None)
        self._own.cpu_percent(None)

    def look(self) -> Use:
        busy = psutil.cpu_percent(None) / 100 - self._own.cpu_percent(None) / 100 / self._cores
        return Use(min(1.0, max(0.0, busy)), on_battery())


async def keep_resting(
    limits: Limits,
    look: Callable[[], Use],
    told: Callable[[str], None],
    clock: Callable[[], float],
    look_s: float = LOOK_S,
) -> None:
    """Tells with each change why the node rests; empty: it works."""
    rest = Rest()
    while True:
        await asyncio.sleep(look_s)
        before, rest = rest, decide(rest, look(), clock(), limits)
        if bool(rest.why) != bool(before.why):
            told(rest.why)
