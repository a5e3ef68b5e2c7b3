"""Proxies in front of real processes for tests that are not asynchronous: they run in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from support.proxy import Proxy

T = TypeVar("T")


class Gates:
    """Proxies by name. Each is made with the port that a process is going to listen on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxies: dict[str, Proxy] = {}

    def add(self, name: str, port: int) -> int:
        """Starts a proxy for 127.0.0.1:`port`; returns the port to dial instead."""

        async def start() -> Proxy:
            proxy = Proxy("127.0.0.1", port)
            await proxy.start()
            return proxy

        self._proxies[name] = asyncio.run_coroutine_threadsafe(start(), self._loop).result(10.0)
        return self._proxies[name].port

    def set(self, name: str, **changes: float | bool) -> None:
        self._on_loop(lambda: self._proxies[name].set(**changes))

    def cut(self, name: str) -> None:
        self._on_loop(self._proxies[name].cut)

    def mend(self, name: str) -> None:
        """Ends whatever was done to a link. What was swallowed is not made up for: its connections break."""

        def mend() -> None:
            proxy = self._proxies[name]
            if proxy.up.swallow:
                proxy.cut()
            proxy.set(delay_s=0.0, bytes_per_s=0.0, trickle_s=0.0)
            proxy.mend()

        self._on_loop(mend)

    def passed(self, name: str) -> int:
        """Bytes that the far end has sent so far."""
        return self._on_loop(lambda: self._proxies[name].bytes_down)

    def close(self) -> None:
        async def close() -> None:
            for proxy in self._proxies.values():
                await proxy.close()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _on_loop(self, do: Callable[[], T]) -> T:
        async def run() -> T:
            return do()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10.0)


@contextmanager
def gates() -> Iterator[Gates]:
    """Proxies that end with the block."""
    running = Gates()
    try:
        yield running
    finally:
        running.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
