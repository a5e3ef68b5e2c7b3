"""Measures the links to the peers that the tracker names, with echoes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

import grpc

from meshnet.node.frames import OPTIONS
from meshnet.node.links import Dial, dial_plain
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol import membership_pb2 as membership
from meshnet.protocol.dataplane_pb2_grpc import DataPlaneStub
from meshnet.protocol.tls import explained

EVERY_S = 20.0
ROUNDS = 7
SMALL = 64
LARGE = 256 << 10
ECHO_S = 5.0
MAX_AT_ONCE = 4


async def measure(node_id: str, address: str, dial: Dial = dial_plain) -> membership.LinkTime:
    """One way in milliseconds (half of the median round trip) and bytes per second; or why not."""
    told = membership.LinkTime(peer=node_id)
    try:
        async with dial(address, node_id, OPTIONS) as channel:
            stub = DataPlaneStub(channel)
            small, large = pb.EchoMessage(payload=bytes(SMALL)), pb.EchoMessage(payload=bytes(LARGE))
            await stub.Echo(small, timeout=ECHO_S)
            trips = [await _trip(stub, small) for _ in range(ROUNDS)]
            loaded = min([await _trip(stub, large) for _ in range(2)])
    except grpc.aio.AioRpcError as error:
        reason = explained(error.details() or error.code().name)
        told.error = f"cannot reach {node_id} at {address}: {reason}"
        return told
    trip = statistics.median(trips)
    told.ms = trip * 1000 / 2
    told.bytes_per_s = 2 * LARGE / max(loaded - min(trips), 1e-5)
    return told


async def _trip(stub: DataPlaneStub, message: pb.EchoMessage) -> float:
    started = time.perf_counter()
    await stub.Echo(message, timeout=ECHO_S)
    return time.perf_counter() - started


class LinkMeasurer:
    """Measures all peers when they change, and every so often. `report` gets what was found."""

    def __init__(self, report: Callable[[Sequence[membership.LinkTime]], None], dial: Dial) -> None:
        self._report = report
        self._dial = dial
        self._peers: dict[str, str] = {}
        self._changed = asyncio.Event()

    def use(self, peers: dict[str, str]) -> None:
        """Node id -> address, the whole list."""
        if peers != self._peers:
            self._peers = dict(peers)
            self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            peers = list(self._peers.items())
            gate = asyncio.Semaphore(MAX_AT_ONCE)

            async def one(node_id: str, address: str, gate: asyncio.Semaphore = gate) -> membership.LinkTime:
                async with gate:
                    return await measure(node_id, address, self._dial)

            found = await asyncio.gather(*(one(node_id, address) for node_id, address in peers))
            if found:
                self._report(found)
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
