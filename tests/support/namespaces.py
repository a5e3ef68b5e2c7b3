"""Hosts of their own on one machine: network namespaces with addresses, joined by a bridge."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def reason_not_allowed() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"mn-try-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


@dataclass(frozen=True)
class Host:
    """One namespace with one address."""

    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def run(self, *command: str) -> None:
        """Runs a command on this host and checks it."""
        _run(*self.prefix, *command)


def inside(host: Host, work: Callable[[], T]) -> T:
    """Runs `work` in a thread whose sockets are this host's."""
    libc = ctypes.CDLL(None, use_errno=True)

    def run() -> T:
        with Path(f"/run/netns/{host.namespace}").open("rb") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@contextmanager
def hosts(count: int) -> Iterator[Sequence[Host]]:
    """`count` hosts 10.77.0.1, .2, ... on one bridge, which has a namespace of its own."""
    tag = uuid.uuid4().hex[:5]
    switch = f"mn{tag}s"
    names = [f"mn{tag}{index}" for index in range(1, count + 1)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        found = []
        for index, name in enumerate(names, start=1):
            address = f"10.77.0.{index}"
            _run(
                "ip",
                "link",
                "add",
                f"v{tag}{index}",
                "netns",
                switch,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _run("ip", "-n", switch, "link", "set", f"v{tag}{index}", "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            found.append(Host(name, address))
        yield found
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
