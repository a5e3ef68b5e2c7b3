"""Says on the local network (mDNS) where the tracker is, so that a node needs no address."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping

import psutil
import structlog

from meshnet.protocol.finding import SERVICE

log = structlog.get_logger("meshnet.beacon")


def own_addresses(host: str) -> list[str]:
    """The addresses under which a listener on `host` is reached from the local network."""
    try:
        listening = ipaddress.ip_address(host)
    except ValueError:
        with contextlib.suppress(OSError):
            return [str(socket.gethostbyname(host))]
        return []
    if not listening.is_unspecified:
        return [str(listening)]
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


class Beacon:
    """`start` never fails: a network without multicast has no beacon, and joins by link."""

    def __init__(self, host: str, port: int, told: Mapping[str, str]) -> None:
        self._host = host
        self._port = port
        self._told = dict(told)
        self._zeroconf: object | None = None

    async def start(self) -> None:
        from zeroconf import IPVersion, ServiceInfo
        from zeroconf.asyncio import AsyncZeroconf

        addresses = own_addresses(self._host)
        if not addresses:
            return
        title = f"{self._told['name']}-{self._told['mesh'][:8]}-{self._told['tracker'][:8]}"
        try:
            info = ServiceInfo(
                SERVICE,
                f"{title}.{SERVICE}",
                port=self._port,
                properties=self._told,
                server=f"{title}.local.",
                parsed_addresses=addresses,
            )
            zeroconf = AsyncZeroconf(interfaces=addresses, ip_version=IPVersion.V4Only)
            self._zeroconf = zeroconf
            await (await zeroconf.async_register_service(info, allow_name_change=True))
        except Exception as error:
            # Whatever multicast makes of this network, or of a long name: everything else works without.
            log.info("no beacon on the local network", reason=str(error) or type(error).__name__)

    async def stop(self) -> None:
        from zeroconf.asyncio import AsyncZeroconf

        if isinstance(self._zeroconf, AsyncZeroconf):
            # What it could not start it cannot end either; the tracker ends all the same.
            with contextlib.suppress(Exception):
                await self._zeroconf.async_unregister_all_services()
            with contextlib.suppress(Exception):
                await self._zeroconf.async_close()
