"""`meshnet model`: bring models here, list them, cut them, check that a cut changes nothing, plan cuts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from meshnet.commands.balance import STREAMS, rows_of, weigh
from meshnet.commands.collection import alias, default, load, unload
from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile, model_info
from meshnet.models.slice import plan_slice, write_slice
from meshnet.models.store import Store, StoredModel

model = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
model.command()(load)
model.command()(unload)
model.command()(default)
model.command()(alias)

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)([kmgt]?)(i?)b?$")

Report = Callable[[int, int], None]


@contextmanager
def _errors() -> Iterator[None]:
    """Errors about models are one sentence on stderr and a non-zero exit."""
    try:
        yield
    except ModelError as error:
        sys.stderr.write(f"meshnet model: {error}\n")
        raise typer.Exit(1) from error


@contextmanager
def _bar(label: str) -> Iterator[Report]:
    """A progress bar on stderr, from the first report on; the function takes bytes done and bytes in all."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task(label, total=None)

    def report(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        progress.stop()


def parse_layers(text: str) -> tuple[int, int]:
    """`A-B` (or `A` alone) as first and last layer. Raises typer.BadParameter."""
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise typer.BadParameter(f"'{text}' is no layer range; write it like 0-14")
    return int(first), int(last if dash else first)


def parse_cuts(text: str) -> list[int]:
    """`10,20` as a list of layers. Raises typer.BadParameter."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise typer.BadParameter(f"'{text}' is no list of layers; write it like 10,20")
    return [int(part) for part in parts]


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@model.command()
def pull(
    what: Annotated[str, typer.Argument(help="smollm2, hf:ORG/REPO/FILE.gguf, or a path.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the entry as JSON.")] = False,
) -> None:
    """Bring a model into the store; a download that was cut goes on where it was."""
    with _errors():
        store = Store()
        with _bar(what) as report:
            entry = store.pull(what, progress=report)
        file = ModelFile.open(entry.path)
        with _bar("fingerprint") as report:
            found = store.fingerprint(file, progress=report)
    if as_json:
        _print_json({**_entry(entry), **model_info(file), "fingerprint": found.value})
    else:
        sys.stdout.write(f"{entry.id}: {file.n_layers} layers, {file.quantisation}, {entry.path}\n")


@model.command()
def ls(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the models in the store."""
    rows: list[dict[str, Any]] = []
    with _errors():
        for entry in Store().ls():
            try:
                rows.append({**model_info(ModelFile.open(entry.path)), **_entry(entry)})
            except ModelError as error:
                rows.append({**_entry(entry), "problem": str(error)})
    if as_json:
        _print_json(rows)
        return
    if not rows:
        sys.stdout.write("no models yet; run: meshnet model pull smollm2\n")
        return
    lines = [("id", "architecture", "layers", "context", "quantisation", "size", "file")]
    for row in rows:
        known = [str(row.get(key, "-")) for key in ("arch", "layers", "context", "quantisation")]
        size = f"{row['bytes'] / 1e6:.1f} MB" if "bytes" in row else "-"
        names = " ".join([row["id"], *(f"({alias})" for alias in row["aliases"])])
        lines.append((names, known[0], known[1], known[2], known[3], size, row.get("problem") or row["path"]))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _entry(entry: StoredModel) -> dict[str, Any]:
    return {
        "id": entry.id,
        "aliases": list(entry.aliases),
        "path": str(entry.path),
        "source": entry.source,
    }


@model.command("slice")
def slice_(
    file: Annotated[str, typer.Argument(help="Model id or path.")],
    layers: Annotated[str, typer.Option(help="First and last layer, both included: A-B.")],
    out: Annotated[Path | None, typer.Option(help="File to write; else NAME-A-B.gguf here.")] = None,
) -> None:
    """Write a range of layers as a GGUF of its own."""
    first, last = parse_layers(layers)
    with _errors():
        store = Store()
        source = store.open(file)
        plan_slice(source, first, last)  # refuses before a large file is hashed
        with _bar("fingerprint") as report:
            source = store.identified(source, progress=report)
        plan = plan_slice(source, first, last)
        target = out or Path(f"{source.name}-{first}-{last}.gguf")
        with _bar(target.name) as report:
            write_slice(plan, target, report)
    sys.stdout.write(
        f"{target}: layers {first}-{last} of {source.name}, {plan.copy_bytes} bytes of weights\n"
    )


@model.command()
def check(
    file: Annotated[str, typer.Argument(help="Model id or path.")],
    cuts: Annotated[
        str, typer.Option(help="First layers of the pieces after the first: 10,20 (default: the middle).")
    ] = "",
    replay: Annotated[
        bool, typer.Option("--replay", help="Prove where rebuilt sessions are exact to the bit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run a model whole and cut, side by side, and say that they are identical or where they part."""
    from meshnet.engine.check import run_check

    wanted = parse_cuts(cuts)
    with _errors():
        path = Store().resolve(file).path
        code = run_check(path, wanted, replay=replay, json_output=as_json)
    raise typer.Exit(code)


class Objective(StrEnum):
    """What a plan makes best: the slowest stage, or one token's way through all."""

    throughput = "throughput"
    latency = "latency"


@model.command()
def plan(
    file: Annotated[str, typer.Argument(help="Model id or path.")],
    nodes: Annotated[
        str, typer.Option(help="name:speed,... with speed in tokens per second, or in any one unit.")
    ],
    memory: Annotated[
        str, typer.Option(help="name:size,... like a:8GB; a node that is not named can hold the whole model.")
    ] = "",
    objective: Annotated[
        Objective, typer.Option(help="Fastest slowest stage (many streams), or shortest way (one stream).")
    ] = Objective.throughput,
    streams: Annotated[
        int,
        typer.Option(min=1, help="Calls at once that the plan is for; they run in as many groups as nodes."),
    ] = STREAMS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Propose where to cut a model for these nodes, the output matrix and the embedding counted."""
    from meshnet.routing.placement import PlacementImpossible, PlacementNode, place

    speeds = parse_speeds(nodes)
    sizes = parse_sizes(memory, speeds)
    with _errors():
        source = Store().open(file)
    rows = 1 if objective is Objective.latency else rows_of(streams, len(speeds))
    weighed = weigh(source, rows)
    layers = weighed.layers
    whole = layers.layers + layers.output_work + layers.embedding_work
    given = [
        PlacementNode(name, sizes.get(name, source.n_bytes), 1000.0 / speed / whole)
        for name, speed in speeds.items()
    ]
    try:
        placement = place(layers, given, objective=objective.value)
    except PlacementImpossible as error:
        sys.stderr.write(f"meshnet model: {error}\n")
        raise typer.Exit(1) from error
    if as_json:
        _print_json(placement.to_dict())
        return
    for stage, ms in zip(placement.stages, placement.stage_ms, strict=True):
        share = ms / placement.slowest_ms
        sys.stdout.write(f"{stage.node_id}: layers {stage.start_layer}-{stage.end_layer}, {share:.0%} busy\n")
    cuts = [str(stage.start_layer) for stage in placement.stages[1:]]
    sys.stdout.write(f"cuts: {','.join(cuts) or 'none'}\n")
    for reason in (weighed.why, *placement.why):
        sys.stdout.write(f"  {reason}\n")


def _named(text: str, what: str) -> dict[str, str]:
    """`a:x,b:y` as a mapping. Raises typer.BadParameter."""
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, colon, value = part.rpartition(":")
        if not colon or not name or name in found:
            raise typer.BadParameter(f"'{part}' is no name:{what}, or the name stands twice")
        found[name] = value
    return found


def parse_speeds(text: str) -> dict[str, float]:
    """`a:30,b:12.5` as speeds by node. Raises typer.BadParameter."""
    speeds: dict[str, float] = {}
    for name, value in _named(text, "speed").items():
        try:
            speeds[name] = float(value)
        except ValueError:
            speeds[name] = 0.0
        if not 0 < speeds[name] < float("inf"):
            raise typer.BadParameter(f"the speed of {name} is '{value}'; give a number above 0")
    if not speeds:
        raise typer.BadParameter("no node is named; write them like a:30,b:12")
    return speeds


def parse_sizes(text: str, nodes: Mapping[str, float]) -> dict[str, int]:
    """`a:8GB,b:4GiB` as bytes by node; each must be one of `nodes`. Raises typer.BadParameter."""
    sizes: dict[str, int] = {}
    for name, value in _named(text, "size").items():
        match = _SIZE.match(value.strip().lower())
        if match is None:
            raise typer.BadParameter(f"the memory of {name} is '{value}'; write it like 8GB or 512MiB")
        if name not in nodes:
            raise typer.BadParameter(f"--memory names {name}, --nodes does not")
        base = 1024 if match[3] else 1000
        sizes[name] = int(float(match[1]) * base ** " kmgt".index(match[2] or " "))
    return sizes
