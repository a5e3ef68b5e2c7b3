"""The client to nodes: kept connections, deadlines, slow readers, peers that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from meshnet.protocol.calls import GenerateCall
from meshnet.tracker import wireclient
from meshnet.tracker.heads import HeadError, Heads
from meshnet.tracker.members import Way
from meshnet.tracker.wireclient import TimeUp, WireClient, WireError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server that hands each connection to `handler`."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def request(reader: asyncio.StreamReader) -> bytes:
    """One request's body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(whole(await request(reader)))


@pytest.fixture
async def client() -> AsyncIterator[WireClient]:
    made = WireClient(2.0)
    yield made
    await made.close()


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_connections_are_kept_and_used_again(client: WireClient) -> None:
    async with Peer(echo) as peer:
        for k in range(5):
            exchange = await client.post(peer.url, "/x", b"%d" % k, "ticket")
            assert await exchange.opened(soon()) == 200
            assert await exchange.read_all(100, soon()) == b"%d" % k
            exchange.finish()
        assert peer.connections == 1


async def test_a_kept_connection_that_the_peer_has_closed_is_replaced() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(whole(b'{"prompt_tokens": 3}'))
        await reader.read(1)

    heads = Heads(2.0)
    call = GenerateCall("c", 0, "chat", "m", {}, "t", 1, 1)
    async with Peer(once) as peer:
        for _ in range(3):
            assert await heads.tokenize(Way(peer.url), call) == 3
        assert peer.connections == 3
    await heads.close()


async def test_a_peer_that_says_nothing_is_left_at_the_deadline(client: WireClient) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Peer(mute) as peer:
        exchange = await client.post(peer.url, "/x", b"", "ticket")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeUp):
            await exchange.opened(soon(0.3))
        assert asyncio.get_running_loop().time() - begun < 2
        exchange.close()


async def test_what_came_while_this_process_stood_still_is_no_missed_deadline(client: WireClient) -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.1)
        for word in (b"one", b"two"):
            writer.write(b"3\r\n%s\r\n" % word)
            time.sleep(0.5)  # noqa: ASYNC251 - the whole loop, and the client with it, stands still
        await reader.read()

    async with Peer(late) as peer:
        exchange = await client.post(peer.url, "/x", b"", "ticket")
        await exchange.opened(soon())
        assert await exchange.read(soon(0.3)) == b"onetwo"
        with pytest.raises(TimeUp):
            await exchange.read(soon(0.3))
        exchange.close()


async def test_a_wait_can_be_interrupted_and_gone_on_with(client: WireClient) -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.2)
        writer.write(b"2\r\nhi\r\n0\r\n\r\n")
        await reader.read()

    async with Peer(slow) as peer:
        exchange = await client.post(peer.url, "/x", b"", "ticket")
        await exchange.opened(soon())
        asyncio.get_running_loop().call_later(0.05, exchange.interrupt, KeyError("look"))
        with pytest.raises(KeyError):
            await exchange.read(soon())
        assert await exchange.read(soon()) == b"hi"
        assert await exchange.read(soon()) == b""
        exchange.interrupt(KeyError("later"))
        exchange.finish()


async def test_a_reader_that_does_not_read_holds_the_peer_back(client: WireClient) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
            await writer.drain()
            sent += 0x4000

    async with Peer(flood) as peer:
        exchange = await client.post(peer.url, "/x", b"", "ticket")
        await exchange.opened(soon())
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        held = sent
        assert held < 32 << 20
        assert len(await exchange.read(soon())) < wireclient.HIGH_WATER + (512 << 10)
        await asyncio.sleep(0.3)
        exchange.close()


async def test_answers_without_end_or_length_and_what_is_no_http(client: WireClient) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel")

    async def rubbish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        await reader.read()

    async with Peer(cut) as peer:
        exchange = await client.post(peer.url, "/x", b"", "ticket")
        await exchange.opened(soon())
        assert await exchange.read(soon()) == b"hel"
        with pytest.raises(WireError, match="broke off"):
            await exchange.read(soon())
    async with Peer(rubbish) as peer:
        exchange = await client.post(peer.url, "/x", b"", "ticket")
        with pytest.raises(WireError, match="HTTP"):
            await exchange.opened(soon())
    async with Peer(echo) as peer:
        exchange = await client.post(peer.url, "/x", b"y" * 1000, "ticket")
        await exchange.opened(soon())
        with pytest.raises(WireError, match="longer"):
            await exchange.read_all(100, soon())
    with pytest.raises(WireError, match="no connection"):
        await client.post("http://127.0.0.1:1", "/x", b"", "ticket")
    with pytest.raises(WireError, match="no address"):
        await client.post("ftp://example", "/x", b"", "ticket")


async def test_refusals_keep_the_peers_words() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        body = b'{"error": {"message": "too long", "code": "context_length_exceeded", "param": "messages"}}'
        writer.write(whole(body, b"400 Bad Request"))
        await reader.read()

    heads = Heads(2.0)
    async with Peer(refuse) as peer:
        with pytest.raises(HeadError) as refused:
            await heads.tokenize(Way(peer.url), GenerateCall("c", 0, "chat", "m", {}, "t", 1, 1))
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        assert (refused.value.message, refused.value.param) == ("too long", "messages")
    await heads.close()


async def test_while_all_connections_are_taken_a_spare_one_is_opened(client: WireClient) -> None:
    async with Peer(echo) as peer:
        first = await client.post(peer.url, "/x", b"1", "ticket")
        while not any(client._idle.values()):
            await asyncio.sleep(0.01)
        second = await client.post(peer.url, "/x", b"2", "ticket")
        for exchange in (first, second):
            assert await exchange.opened(soon()) == 200
            await exchange.read_all(100, soon())
        assert second.used
        assert peer.connections == 2
