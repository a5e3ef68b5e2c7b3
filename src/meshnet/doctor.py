"""What `meshnet doctor` looks at: each check says what it found and, when it is not well, what helps."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from meshnet import __version__
from meshnet.protocol import PROTOCOL_VERSION
from meshnet.protocol.addresses import loopback_host

GIB = 1 << 30
MIN_FREE_MEMORY = GIB
MIN_FREE_DISK = 2 * GIB
MAX_CLOCK_SECONDS = 30.0
PORTS = {"tracker HTTP": 8080, "tracker gRPC": 8081, "node HTTP": 7000, "node gRPC": 7001}
CPU_FEATURES = {"x86_64": ("avx2", "fma", "f16c"), "aarch64": ("asimd", "fphp")}

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One check's result; `remedy` is empty when all is well."""

    check: str
    state: State
    detail: str
    remedy: str = ""


def check_python() -> Finding:
    """Version of Python and of meshnet."""
    detail = f"{platform.python_version()} on {platform.platform()}, meshnet {__version__}"
    return Finding("python", "ok", detail)


def check_engine() -> Finding:
    """The llama.cpp library: found, of the pinned version, with the layout that we know."""
    from meshnet.engine.base import EngineError
    from meshnet.engine.library import load_library

    try:
        library = load_library()
    except (EngineError, OSError) as error:
        return Finding("engine", "fail", str(error), "reinstall: pip install --force-reinstall meshnet")
    return Finding("engine", "ok", f"{library.provider} {library.version} at {library.path}")


def check_cpu() -> Finding:
    """Cores and the vector instructions that llama.cpp's kernels want."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = platform.machine()
    wanted = CPU_FEATURES.get(machine, ())
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set(wanted)
    missing = [feature for feature in wanted if feature not in flags]
    detail = f"{cores} usable cores, {machine}"
    if missing:
        return Finding(
            "cpu",
            "warn",
            f"{detail}, without {', '.join(missing)}",
            "expect slow decoding here; give this machine few layers, or another machine its layers",
        )
    return Finding("cpu", "ok", detail)


def check_memory() -> Finding:
    """Memory that is free now."""
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"
    if memory.available < MIN_FREE_MEMORY:
        return Finding(
            "memory", "warn", detail, "close programs, or limit a node: meshnet node --memory BYTES"
        )
    return Finding("memory", "ok", detail)


def check_disk(folder: Path) -> Finding:
    """Room where models and shards are kept."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(existing, os.W_OK):
        return Finding(
            "disk", "fail", f"{existing} cannot be written", "set MESHNET_CACHE to a folder of yours"
        )
    if free < MIN_FREE_DISK:
        return Finding("disk", "warn", detail, "free some room, or set MESHNET_CACHE to a larger disk")
    return Finding("disk", "ok", detail)


def check_port(name: str, port: int) -> Finding:
    """Whether the default port can be bound on this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            option = "--grpc-port" if "gRPC" in name else "--port"
            return Finding(
                f"port {port}",
                "warn",
                f"{name}: in use",
                f"another meshnet may be running; else choose another with {option}",
            )
    return Finding(f"port {port}", "ok", f"{name}: free")


def check_tracker(url: str) -> Iterator[Finding]:
    """The tracker answers, its gRPC port is open from here, the versions agree and so do the clocks."""
    try:
        with _open(f"{url.rstrip('/')}/api/join-info") as answer:
            info = msgspec.json.decode(answer.read())
            date = answer.headers.get("Date")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        yield Finding(
            "tracker",
            "fail",
            f"{url} does not answer: {error}",
            "check the address, that the tracker listens beyond loopback (--host 0.0.0.0), and its firewall",
        )
        return
    yield Finding("tracker", "ok", f"{url}: meshnet {info['version']}, mesh {info['mesh_id']}")
    yield check_tls(urllib.parse.urlsplit(url).hostname or "", bool(info.get("tls")), str(info.get("ca", "")))
    if info["protocol_version"] != PROTOCOL_VERSION:
        yield Finding(
            "versions",
            "fail",
            f"protocol {info['protocol_version']} there, {PROTOCOL_VERSION} here",
            f"install the same version here: pip install meshnet=={info['version']}",
        )
    host, _, port = str(info["grpc_address"]).rpartition(":")
    if host in ("0.0.0.0", "::", ""):  # noqa: S104
        host = urllib.parse.urlsplit(url).hostname or "127.0.0.1"
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        yield Finding("membership", "ok", f"{host}:{port} is reachable")
    except OSError as error:
        yield Finding(
            "membership",
            "fail",
            f"{host}:{port} cannot be reached: {error}",
            f"open TCP port {port} in the firewall of the tracker's machine",
        )
    if date:
        apart = abs(parsedate_to_datetime(date).timestamp() - time.time())
        if apart > MAX_CLOCK_SECONDS:
            yield Finding(
                "clock",
                "fail",
                f"{apart:.0f} s apart from the tracker's",
                "turn on time synchronisation (timedatectl set-ntp true)",
            )
        else:
            yield Finding("clock", "ok", f"within {max(apart, 1):.0f} s of the tracker's")


def check_tls(host: str, tls: bool, ca: str) -> Finding:
    """Whether the machines of the mesh speak TLS, where others could listen in."""
    if tls:
        return Finding("tls", "ok", f"between the machines; the mesh's fingerprint is {ca}")
    if loopback_host(host):
        return Finding("tls", "ok", "none: the mesh is on this machine alone")
    return Finding(
        "tls",
        "warn",
        "the machines of the mesh speak plain: prompts, answers and join tokens can be listened to",
        "start the tracker and its nodes without --insecure",
    )


def check_nodes(url: str, key: str) -> Iterator[Finding]:
    """What the tracker and the nodes report of each other, such as ports that a firewall closes."""
    request = urllib.request.Request(  # noqa: S310
        f"{url.rstrip('/')}/api/nodes", headers={"authorization": f"Bearer {key}"}
    )
    try:
        with _open(request) as answer:
            nodes = msgspec.json.decode(answer.read())["nodes"]
    except (OSError, ValueError, KeyError, msgspec.DecodeError) as error:
        yield Finding(
            "nodes",
            "warn",
            f"{url}/api/nodes: {error}",
            "put an admin key of this mesh into MESHNET_API_KEY, or leave it out",
        )
        return
    for node in nodes:
        for problem in node["problems"]:
            what, _, remedy = str(problem).partition("; ")
            yield Finding("nodes", "warn", what, remedy or f"look at the log of {node['name']}")
    if not any(node["problems"] for node in nodes):
        yield Finding("nodes", "ok", f"{len(nodes)} known, none has a problem")


def _open(request: str | urllib.request.Request) -> Any:
    """What a tracker answers. Whose certificate it has does not matter, unless a key goes to it."""
    context = ssl.create_default_context()
    if isinstance(request, str):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.urlopen(request, timeout=5, context=context)  # noqa: S310


def examine(*, cache: Path, tracker: str | None) -> Iterator[Finding]:
    """All checks, in the order a person would ask."""
    checks: list[Callable[[], Finding]] = [check_python, check_engine, check_cpu, check_memory]
    for check in checks:
        yield check()
    yield check_disk(cache)
    for name, port in PORTS.items():
        yield check_port(name, port)
    if tracker:
        yield from check_tracker(tracker)
        if key := os.environ.get("MESHNET_API_KEY", ""):
            yield from check_nodes(tracker, key)
