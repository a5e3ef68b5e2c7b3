"""What the benchmarks share: the machine's line, medians, and one table for terminal and Markdown.

These machines are noisy: each benchmark interleaves what it compares within one run, repeats it, and
prints median, min and max together with the ratio.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""One Markdown file per benchmark; `make bench` joins them into RESULTS.md."""


def machine() -> str:
    """Cores, CPU, Python and the engine's version, in one line."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{cores} cores ({cpu})", f"Python {platform.python_version()}"]
    for package in ("meshnet", "xllamacpp"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join(parts)


def busy_seconds() -> tuple[float, float] | None:
    """CPU seconds so far of the whole machine, and of this process with the children that have ended; None
    where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft) / ticks, sum(own[:4])


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements of one thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError for no values."""
        listed = sorted(values)
        if not listed:
            raise ValueError("no measurements")
        return cls(statistics.median(listed), listed[0], listed[-1])

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def ratios(top: Sequence[float], bottom: Sequence[float]) -> Spread:
    """Pair by pair, so that a machine whose speed drifts does not blur the comparison."""
    return Spread.of(a / b for a, b in zip(top, bottom, strict=True))


@dataclass
class Table:
    """Rows of text under a title, with the command that made them."""

    title: str
    columns: Sequence[str]
    command: str = field(
        default_factory=lambda: "python " + " ".join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    )
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _begun: tuple[float, tuple[float, float] | None] = field(
        default_factory=lambda: (time.monotonic(), busy_seconds())
    )

    def others(self) -> str:
        """What other processes took of the machine since the table was begun; measure with little of that."""
        (clock, before), after = self._begun, busy_seconds()
        if before is None or after is None:
            return ""
        busy = (after[0] - before[0]) - (after[1] - before[1])
        share = max(busy, 0.0) / max((time.monotonic() - clock) * (os.cpu_count() or 1), 1e-6)
        return f", other processes took {share:.0%} of the machine"

    def add(self, *cells: object) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([str(cell) for cell in cells])

    def markdown(self) -> str:
        widths = [
            max(len(str(row[i])) for row in [self.columns, *self.rows]) for i in range(len(self.columns))
        ]

        def line(cells: Sequence[str]) -> str:
            return (
                "| "
                + " | ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True))
                + " |"
            )

        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        body = [line(self.columns), rule, *(line(row) for row in self.rows)]
        return (
            "\n".join(
                [
                    f"## {self.title}",
                    "",
                    f"`{self.command}` on {machine()}{self.others()}",
                    "",
                    *body,
                    "",
                    *(f"- {note}" for note in self.notes),
                ]
            ).rstrip()
            + "\n"
        )

    def publish(self, name: str, *, keep: bool) -> None:
        """Prints the table; with `keep`, also writes it for RESULTS.md."""
        text = self.markdown()
        sys.stdout.write(text)
        if keep:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.md").write_text(text)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--repeats", type=int, default=5, help="measurements of each thing, interleaved")
    made.add_argument("--keep", action="store_true", help="write the table for RESULTS.md as well")
    return made
