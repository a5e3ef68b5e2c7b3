"""`meshnet model`: bring models here, list them, cut them, check that a cut changes nothing, plan cuts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile, model_info
from meshnet.models.slice import plan_slice, write_slice
from meshnet.models.store import Store, StoredModel

model = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

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
    cuts: Annotated[str, typer.Option(help="First layers of the pieces after the first: 10,20.")] = "",
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
