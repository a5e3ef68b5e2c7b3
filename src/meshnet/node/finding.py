"""Looks for trackers on the local network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from meshnet.protocol.finding import SERVICE, FoundTracker, found_tracker

LISTEN_S = 1.5
ASK_MS = 2_000
CONNECT_S = 1.0


async def find_trackers(listen_s: float = LISTEN_S) -> list[FoundTracker]:
    """All that answer within that time, by name; none where the network has no multicast."""
    found: dict[str, FoundTracker] = {}
    asking: set[asyncio.Task[None]] = set()

    async def ask(zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(zeroconf, ASK_MS):
            return
        told = {
            key.decode("utf-8", "replace"): (value or b"").decode("utf-8", "replace")
            for key, value in info.properties.items()
        }
        addresses = await _reachable(info.parsed_addresses(), info.port or 0)
        tracker = found_tracker(told, addresses, info.port or 0)
        if tracker is not None:
            found[name] = tracker

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed:
            task = asyncio.get_running_loop().create_task(ask(zeroconf, name))
            asking.add(task)
            task.add_done_callback(asking.discard)

    handlers: list[Callable[..., None]] = [changed]
    try:
        zeroconf = AsyncZeroconf(ip_version=IPVersion.V4Only)
    except OSError:
        return []
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=handlers)
        await asyncio.sleep(listen_s)
        await asyncio.gather(*asking, return_exceptions=True)
        await browser.async_cancel()
    finally:
        with contextlib.suppress(OSError):
            await zeroconf.async_close()
    return [found[name] for name in sorted(found)]


async def _reachable(addresses: list[str], port: int) -> list[str]:
    """Those that take a connection first: a machine has addresses that lead nowhere from here."""

    async def leads_nowhere(address: str) -> bool:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError):
            return True
        writer.transport.abort()
        return False

    worse = await asyncio.gather(*(leads_nowhere(address) for address in addresses))
    return [address for _, address in sorted(zip(worse, addresses, strict=True), key=lambda pair: pair[0])]
