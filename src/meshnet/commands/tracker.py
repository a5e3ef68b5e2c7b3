"""`meshnet tracker`: the endpoint, the dashboard and the control plane of a mesh."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvloop
from pydantic import ValidationError

from meshnet.process import settle, watch_parent
from meshnet.protocol.addresses import bracketed
from meshnet.tracker.logs import set_up_logs
from meshnet.tracker.server import Server, Started, StartError
from meshnet.tracker.settings import TrackerSettings


def tracker(
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0 takes a free one (default 8080).")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port for nodes; 0 takes a free one.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Host that nodes are told to dial.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder for keys, ledger and settings.")] = None,
    database: Annotated[str | None, typer.Option(help="PostgreSQL or SQLite URL instead of --data.")] = None,
    new_keys: Annotated[
        bool, typer.Option("--new-keys", help="Make and show further keys and a join token.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS between the machines of the mesh.")
    ] = False,
    mdns: Annotated[
        bool | None, typer.Option("--mdns/--no-mdns", help="Say on the local network where the tracker is.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The mesh's name for people.")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Own certificate (PEM, with chain) for browsers and clients.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, where it lies in a file of its own.")] = None,
    log: Annotated[str | None, typer.Option(help="Form of the log: console or json.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON on stdout when ready.")
    ] = False,
) -> None:
    """Run the tracker: endpoint, dashboard, planning, ledger."""
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "advertise": advertise,
        "data": data,
        "database": database,
        "new_keys": new_keys or None,
        "insecure": insecure or None,
        "mdns": mdns,
        "name": name,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "log": log,
    }
    try:
        settings = TrackerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            _complain(f"{name} is {problem['input']!r}: {problem['msg']}")
        raise typer.Exit(2) from error
    # With --json stdout belongs to the one line.
    set_up_logs(_form(settings.log), sys.stderr if as_json else sys.stdout)
    try:
        uvloop.run(_run(settings, as_json=as_json))
    except StartError as error:
        _complain(str(error))
        raise typer.Exit(1) from error


def _form(log: str) -> Literal["console", "json"]:
    return "json" if log == "json" else "console"


def _complain(text: str) -> None:
    sys.stderr.write(f"meshnet tracker: {text}\n")


async def _run(settings: TrackerSettings, *, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    parent = asyncio.create_task(watch_parent(stop))
    server = Server(settings)
    started = await server.start()
    settle()
    try:
        _announce(settings, started, as_json=as_json)
        await stop.wait()
    finally:
        parent.cancel()
        await server.stop()


def _announce(settings: TrackerSettings, started: Started, *, as_json: bool) -> None:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104 - shown, not bound
    shown = bracketed(host)
    base = f"{'https' if settings.https_only else 'http'}://{shown}:{started.http_port}"
    secrets = started.secrets
    values: dict[str, Any] = {
        "base_url": f"{base}/v1",
        "dashboard_url": f"{base}/dashboard" + (f"#key={secrets.admin_key}" if secrets else ""),
    }
    if secrets is not None:
        values |= {
            "api_key": secrets.use_key,
            "admin_key": secrets.admin_key,
            "join_token": secrets.join_token,
        }
    values |= {"grpc_address": f"{shown}:{started.grpc_port}", "pid": os.getpid()}
    if as_json:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()
    else:
        sys.stderr.write(_for_people(values))
        sys.stderr.flush()
    if settings.insecure and not settings.loopback:
        _complain(
            f"warning: --insecure on {settings.host}: join tokens, prompts, answers and hidden states travel "
            "between the machines in the clear; keep to a network that you trust"
        )
    if not settings.loopback and not settings.https_only:
        _complain(
            f"warning: browsers and clients reach {settings.host} over plain HTTP: keys, prompts and answers "
            "of theirs travel in the clear; give a certificate that they know (--tls-cert, --tls-key), or "
            "keep to a network that you trust"
        )


def _for_people(values: dict[str, Any]) -> str:
    lines = [
        "",
        f"  dashboard   {values['dashboard_url']}",
        f"  endpoint    {values['base_url']}",
    ]
    if "api_key" in values:
        lines += [
            f"  API key     {values['api_key']}",
            f"  admin key   {values['admin_key']}",
            f"  join token  {values['join_token']}",
            "  (shown this once: they are stored hashed)",
        ]
    lines += [f"  gRPC        {values['grpc_address']}", "", ""]
    return "\n".join(lines)
