"""`meshnet node`: hold layers of a model and compute them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import uvloop

from meshnet.engine.shards import pin_thread
from meshnet.node.app import NodeOptions, StartError, make_node, name_and_port
from meshnet.node.identity import default_folder, known_mesh
from meshnet.node.loader import DEFAULT_SLOTS, EngineOptions
from meshnet.node.logs import set_up_logs
from meshnet.node.rest import Limits
from meshnet.node.ring import DEFAULT_BYTES
from meshnet.protocol.finding import NotChosen, choose
from meshnet.protocol.invitation import InvitationError, parse_link

SWITCH_S = 0.0001
INSECURE = (
    "warning: --insecure: prompts, answers, hidden states and the join token travel in the clear, and "
    "whoever can reach this machine's ports can speak to it; keep to a network that you trust"
)
SIZE = re.compile(r"^(?:(\d+(?:\.\d+)?)([kmgt]?)(i?)b?)?$")
MOST = 65_535
"""No machine has more CPUs, no model more layers."""


def node(
    link: Annotated[
        str, typer.Argument(metavar="[JOIN-LINK]", help="From `meshnet invite`: address and token in one.")
    ] = "",
    tracker: Annotated[str, typer.Option(help="The tracker's address, http://HOST:PORT.")] = "",
    join_token: Annotated[
        str, typer.Option(envvar="MESHNET_JOIN_TOKEN", help="Needed the first time (see `meshnet invite`).")
    ] = "",
    mesh: Annotated[str, typer.Option(help="Which mesh of this network to join, by name or id.")] = "",
    model: Annotated[str, typer.Option(help="Model id, hf:ORG/REPO/FILE.gguf or path.")] = "",
    layers: Annotated[str, typer.Option(help="Layers to hold: A-B[,C-D], both ends included.")] = "",
    name: Annotated[str, typer.Option(help="Name for people (default: the host's).")] = "",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.")] = None,
    cores: Annotated[str, typer.Option(help="CPUs that this node runs on: 0,2 or 0-3.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:N or metal.")] = "auto",
    gpu_layers: Annotated[int, typer.Option(min=0, help="Layers that go to the GPU.")] = 0,
    repack: Annotated[
        bool,
        typer.Option(
            "--repack",
            help="Copy weights into a layout that some CPUs multiply faster: another numerics class.",
        ),
    ] = False,
    ctx: Annotated[int | None, typer.Option(min=64, help="Positions per session.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Sessions at the same time.")] = DEFAULT_SLOTS,
    memory: Annotated[int | None, typer.Option(min=1, help="Bytes that the shards may take.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")] = 7000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = 7001,
    line_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for direct lines between nodes; 0 takes a free one.")
    ] = 0,
    no_lines: Annotated[
        bool,
        typer.Option("--no-lines", help="No direct lines: nodes speak to this one by gRPC alone."),
    ] = False,
    advertise: Annotated[str, typer.Option(help="Host that others are told to dial.")] = "",
    advertise_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port that others are told to dial; 0: --port.")
    ] = 0,
    advertise_grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="gRPC port that others are told to dial; 0: --grpc-port.")
    ] = 0,
    entry: Annotated[str, typer.Option(help="Further layers at which sessions may start: 10,20.")] = "",
    data: Annotated[Path | None, typer.Option(help="Folder for the node's id and credential.")] = None,
    download_limit: Annotated[
        str, typer.Option(help="Bytes per second that fetched weights may take: 5MB, 500KiB.")
    ] = "",
    link_dtype: Annotated[str, typer.Option(help="Hidden states to other nodes: f32 or f16.")] = "f32",
    max_gap: Annotated[
        float, typer.Option(min=1, help="Milliseconds that a prompt may keep running streams waiting.")
    ] = 250.0,
    replay_buffer: Annotated[
        int, typer.Option(min=0, help="Bytes of sent hidden states that are kept for lost stages.")
    ] = DEFAULT_BYTES,
    when: Annotated[
        str, typer.Option(help="always, or idle: rest while others use the machine, and on battery.")
    ] = "always",
    idle_cpu: Annotated[
        float, typer.Option(min=0, max=1, help="With --when idle: more of the CPU for others is use.")
    ] = Limits().others,
    idle_after: Annotated[
        float, typer.Option(min=0, help="With --when idle: seconds without use before it works.")
    ] = Limits().calm_s,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS; the tracker needs --insecure as well.")
    ] = False,
    no_drafts: Annotated[
        bool, typer.Option("--no-drafts", help="Guess no tokens ahead, however far the links are.")
    ] = False,
    no_retry: Annotated[bool, typer.Option("--no-retry", help="End when the tracker is not there.")] = False,
    log: Annotated[str, typer.Option(help="Form of the log: console or json.")] = "console",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON on stdout when ready.")
    ] = False,
) -> None:
    """Run a node: hold layers of a model and compute them."""
    pin = ""
    if link:
        try:
            invitation = parse_link(link)
        except InvitationError as error:
            _complain(str(error))
            raise typer.Exit(2) from error
        tracker, join_token, pin = tracker or invitation.tracker, invitation.token, invitation.ca
    if mesh and tracker:
        _complain("--mesh chooses among the meshes of this network: leave it out beside a link or --tracker")
        raise typer.Exit(2)
    if model and not layers:
        _complain("--layers is missing: say which layers of the model to hold, as in --layers 0-14")
        raise typer.Exit(2)
    if layers and not model:
        _complain("--model is missing: say which model's layers to hold")
        raise typer.Exit(2)
    for flag, value, choices in (
        ("log", log, ("console", "json")),
        ("link-dtype", link_dtype, ("f32", "f16")),
        ("when", when, ("always", "idle")),
    ):
        if value not in choices:
            _complain(f"--{flag} is {value!r}; {' and '.join(choices)} are possible")
            raise typer.Exit(2)
    if not tracker:
        tracker, join_token = _found(mesh, join_token, data or default_folder(name_and_port(name, port)))
    options = NodeOptions(
        tracker=tracker,
        join_token=join_token,
        pin=pin,
        insecure=insecure,
        model=model,
        layers=layers,
        name=name,
        engine=EngineOptions(
            threads=threads,
            cores=_cores(cores),
            device=device,
            gpu_layers=gpu_layers,
            repack=repack,
            n_ctx=ctx,
            n_slots=slots,
            memory=memory,
            replay_buffer=replay_buffer,
        ),
        host=host,
        port=port,
        grpc_port=grpc_port,
        line_port=line_port,
        lines=not no_lines,
        advertise=advertise,
        advertise_port=advertise_port,
        advertise_grpc_port=advertise_grpc_port,
        entry=_numbers("entry", entry),
        data=data,
        retry=not no_retry,
        link_dtype=link_dtype,
        download_limit=_size("download-limit", download_limit),
        max_gap_ms=max_gap,
        rest=Limits(idle_cpu, idle_after) if when == "idle" else None,
        drafts=not no_drafts,
    )
    if insecure:
        _complain(INSECURE)
    # With --json stdout belongs to the one line.
    set_up_logs("json" if log == "json" else "console", sys.stderr if as_json else sys.stdout)
    code = 0
    # The engine's thread must not wait long for Python's lock when a computation ends.
    sys.setswitchinterval(SWITCH_S)
    try:
        uvloop.run(_run(options, as_json=as_json))
    except StartError as error:
        _complain(str(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine's thread may be deep in a computation that cannot be broken off; nothing is left to be saved.
    os._exit(code)


def _found(mesh: str, token: str, folder: Path) -> tuple[str, str]:
    """A tracker of this network and the token for it, which is asked for where somebody can answer."""
    from meshnet.node.finding import find_trackers

    kept = known_mesh(folder)
    try:
        all_found = asyncio.run(find_trackers())
        here = any(each.mesh_id == kept for each in all_found)
        found = choose(all_found, mesh or (kept if here else ""))
    except NotChosen as error:
        _complain(str(error))
        raise typer.Exit(2) from error
    _complain(f"found the mesh {found.name} ({found.mesh_id}) at {found.url}")
    if not token and kept != found.mesh_id:
        if not sys.stdin.isatty():
            _complain(
                "its join token is missing: give --join-token or MESHNET_JOIN_TOKEN, or the join link that "
                "`meshnet invite` prints"
            )
            raise typer.Exit(2)
        token = str(typer.prompt("Join token (from `meshnet invite`)", hide_input=True)).strip()
    return found.url, token


async def _run(options: NodeOptions, *, as_json: bool) -> None:
    running = make_node(options)
    # All threads that start from here on, not the engine's alone: they hand over to each other faster on a
    # core that is awake, and a node leaves its neighbour's cores alone.
    pin_thread(options.engine.cores)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.interrupt)

    def ready(values: dict[str, Any]) -> None:
        if as_json:
            sys.stdout.write(json.dumps(values) + "\n")
            sys.stdout.flush()

    await running.run(ready)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """`"0,2-3"` -> (0, 2, 3)."""
    found: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            _complain(f"--{flag}: {part!r} is not a number or a range")
            raise typer.Exit(2)
        if int(last or first) > MOST:
            _complain(f"--{flag}: {part!r} is above {MOST}")
            raise typer.Exit(2)
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(found))


def _cores(text: str) -> tuple[int, ...]:
    """The CPUs to compute on, each one that this process may use."""
    wanted = _numbers("cores", text)
    usable = sorted(psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else wanted)
    for core in wanted:
        if core not in usable:
            _complain(f"--cores: {core} is not a CPU that this process may use; usable: {_spans(usable)}")
            raise typer.Exit(2)
    return wanted


def _spans(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2,5"`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def _size(flag: str, text: str) -> float:
    """`"5MB"` -> 5e6; nothing -> 0."""
    match = SIZE.match(text.strip().lower().removesuffix("/s"))
    if match is None or (match[1] and not float(match[1])):
        _complain(f"--{flag} is {text!r}; write it like 5MB or 500KiB")
        raise typer.Exit(2)
    unit = 1024 if match[3] else 1000
    return float(match[1] or 0) * float(unit ** " kmgt".index(match[2] or " "))


def _complain(text: str) -> None:
    sys.stderr.write(f"meshnet node: {text}\n")
