"""The proxy that other tests trust: it must really delay, limit, cut, swallow and trickle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.proxy import Link, Proxy


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def _trip(port: int, data: bytes) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        start = time.monotonic()
        writer.write(data)
        got = await reader.readexactly(len(data))
        took = time.monotonic() - start
    finally:
        writer.close()
    assert got == data
    return took


async def test_passes_bytes_unchanged(echo: int) -> None:
    async with Proxy("127.0.0.1", echo) as proxy:
        await _trip(proxy.port, bytes(range(256)) * 4096)
        assert proxy.bytes_up == proxy.bytes_down == 1 << 20


async def test_delays_both_ways(echo: int) -> None:
    async with Proxy("127.0.0.1", echo, link=Link(delay_s=0.05)) as proxy:
        assert await _trip(proxy.port, b"x") >= 0.1


async def test_limits_the_rate(echo: int) -> None:
    async with Proxy("127.0.0.1", echo, link=Link(bytes_per_s=1e6)) as proxy:
        assert await _trip(proxy.port, bytes(200_000)) >= 0.2


async def test_swallows_then_mends_for_new_connections(echo: int) -> None:
    async with Proxy("127.0.0.1", echo) as proxy:
        proxy.set(swallow=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_trip(proxy.port, b"x"), 0.2)
        proxy.mend()
        await _trip(proxy.port, b"x")


async def test_cut_breaks_and_refuses(echo: int) -> None:
    async with Proxy("127.0.0.1", echo) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await _trip(proxy.port, b"x")
        writer.close()


async def test_trickles(echo: int) -> None:
    async with Proxy("127.0.0.1", echo, link=Link(trickle_s=0.01)) as proxy:
        assert await _trip(proxy.port, b"0123456789") >= 0.09
