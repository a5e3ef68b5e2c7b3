"""`meshnet demo`: a whole mesh on this machine, in one command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshnet.commands.balance import STREAMS, rows_of, weigh
from meshnet.demo import DemoError, DemoOptions, Supervisor, parse_cuts, start_demo
from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store
from meshnet.process import watch_parent

AUTO = "auto"


def demo(
    port: Annotated[int, typer.Option(help="Port of the endpoint and dashboard; 0 takes a free one.")] = 8080,
    cuts: Annotated[
        str,
        typer.Option(
            help='Where pieces begin: "15", "10,20", "auto" (two equal nodes), "auto:3", "" for none.'
        ),
    ] = "15",
    model: Annotated[str, typer.Option(help="Model id, hf:ORG/REPO/FILE.gguf or path.")] = "smollm2",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads per node.")] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="The last node holds the whole model.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Nodes per piece.")] = 1,
    data: Annotated[
        Path | None, typer.Option(help="Keep the tracker's data here; else a temporary folder.")
    ] = None,
    ctx: Annotated[int | None, typer.Option(min=64, help="Positions per slot.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Sessions per node.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Calls at once that --cuts auto is to suit.")] = STREAMS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON on stdout when ready.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the dashboard.")] = False,
) -> None:
    """Start a tracker and one node per piece on this machine, and say where they are."""
    options = DemoOptions(
        model=model,
        cuts=cuts,
        port=port,
        threads=threads,
        overlap=overlap,
        replicas=replicas,
        data=data,
        ctx=ctx,
        slots=slots,
        streams=streams,
    )
    try:
        code = asyncio.run(_run(options, as_json=as_json, browser=not (no_browser or as_json)))
    except (DemoError, ModelError) as error:
        sys.stderr.write(f"meshnet demo: {error}\n")
        raise typer.Exit(1) from error
    raise typer.Exit(code)


async def _run(options: DemoOptions, *, as_json: bool, browser: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    parent = asyncio.ensure_future(watch_parent(stop))
    scratch = None if options.data else tempfile.mkdtemp(prefix="meshnet-demo-")
    data = options.data or Path(str(scratch))
    supervisor = Supervisor()
    try:
        starting = asyncio.ensure_future(_start(options, supervisor, data))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, DemoError):
                await starting
            return 0
        ready = starting.result()
        _announce(ready, as_json=as_json)
        if browser:
            await asyncio.to_thread(webbrowser.open, ready["dashboard_url"])
        return await _watch(supervisor, stopped)
    finally:
        parent.cancel()
        await supervisor.stop()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


async def _start(options: DemoOptions, supervisor: Supervisor, data: Path) -> dict[str, Any]:
    store = Store()
    entry = await asyncio.to_thread(store.pull, options.model)
    file = store.open(entry.id)
    if options.cuts.startswith(AUTO):
        cuts = await asyncio.to_thread(auto_cuts, options.cuts, file, options.streams)
    else:
        cuts = parse_cuts(options.cuts, file.n_layers)
    return await start_demo(options, supervisor, data, model_id=entry.id, n_layers=file.n_layers, cuts=cuts)


def auto_cuts(text: str, file: ModelFile, streams: int) -> tuple[int, ...]:
    """Where to cut for equal nodes and so many streams: `auto` for two of them, `auto:3` for three."""
    from meshnet.routing.placement import PlacementImpossible, PlacementNode, place

    count = text.removeprefix(AUTO).removeprefix(":") or "2"
    if not count.isdecimal() or not 1 <= int(count) <= file.n_layers:
        raise DemoError(f"--cuts: {text!r} is not auto or auto:N with N nodes from 1 to {file.n_layers}")
    weighed = weigh(file, rows_of(streams, int(count)))
    layer_ms = weighed.layer_ms or 1.0
    nodes = [PlacementNode(f"node-{i:03}", file.n_bytes, layer_ms) for i in range(1, int(count) + 1)]
    try:
        placement = place(weighed.layers, nodes, objective="throughput")
    except PlacementImpossible as error:
        raise DemoError(f"--cuts: {error}") from error
    cuts = tuple(stage.start_layer for stage in placement.stages[1:])
    chosen = f"cuts for {streams} streams: {','.join(map(str, cuts)) or 'none'}"
    for reason in (chosen, weighed.why, *placement.why):
        sys.stderr.write(f"meshnet demo: {reason}\n")
    return cuts


async def _watch(supervisor: Supervisor, stopped: asyncio.Task[Any]) -> int:
    """Until told to stop, or until the tracker ends; a node that ends is said and may be missed."""
    tracker, *nodes = supervisor.children
    waits = {asyncio.ensure_future(child.process.wait()): child for child in (tracker, *nodes)}
    pending: set[asyncio.Task[Any]] = {stopped, *waits}
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if stopped in done:
            for task in pending:
                task.cancel()
            return 0
        for task in done:
            child = waits[task]
            sys.stderr.write(
                f"meshnet demo: {child.name} (pid {child.pid}) ended with code {task.result()}\n"
            )
            if child is tracker:
                stopped.cancel()
                return 1


def _announce(ready: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        return
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{ready['model']}[/bold] is ready")
    for node in ready["nodes"]:
        console.print(f"  {node['name']}: layers {node['layers'][0]}-{node['layers'][1]} (pid {node['pid']})")
    console.print(f"\n  dashboard  {ready['dashboard_url']}")
    console.print(f"  endpoint   {ready['base_url']}")
    console.print(f"  API key    {ready['api_key']}")
    console.print("\nCtrl-C stops everything.\n")
