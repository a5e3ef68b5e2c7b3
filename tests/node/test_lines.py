"""Direct lines between nodes: that they are used, when they are not, and what they refuse."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio
from node.bench import LAST, Bench, BenchNode
from support.proxy import Proxy

from meshnet.node.call import Call
from meshnet.node.frames import MAX_MESSAGE_BYTES, Outbox
from meshnet.node.lines import MAX_STRANGERS, TICKET_BYTES, Line, LineDialler, LineServer
from meshnet.protocol import calls
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.certificates import Papers, make_request
from meshnet.protocol.keys import name_of, new_key
from meshnet.tracker.authority import Authority

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The bridge over the river was"
TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(bench: Bench) -> AsyncIterator[tuple[BenchNode, BenchNode]]:
    yield await bench.add(0, 14, n_ctx=256), await bench.add(15, LAST, n_ctx=256)


async def soon(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_tokens_are_the_same_by_line_and_by_grpc(
    bench: Bench, pair: tuple[BenchNode, BenchNode]
) -> None:
    head, tail = pair
    direct = await bench.run([head, tail], PROMPT, max_tokens=TOKENS)
    there, back = head.links.get(tail.node_id, tail.address), tail.links.get(head.node_id, head.address)
    assert there.direct
    assert back.direct
    quiet = await bench.add(15, LAST, n_ctx=256, lines=False)
    by_grpc = await bench.run([head, quiet], PROMPT, max_tokens=TOKENS)
    assert not head.links.get(quiet.node_id, quiet.address).direct
    assert len(direct.ids()) == TOKENS
    assert by_grpc.ids() == direct.ids()


async def test_behind_a_forwarded_port_frames_stay_on_grpc(
    bench: Bench, pair: tuple[BenchNode, BenchNode]
) -> None:
    head, tail = pair
    async with Proxy("127.0.0.1", tail.server.port) as proxy:
        tail.address_override = proxy.address
        try:
            answer = await bench.run([head, tail], PROMPT, max_tokens=TOKENS)
            assert not head.links.get(tail.node_id, proxy.address).direct
        finally:
            tail.address_override = ""
    assert len(answer.ids()) == TOKENS


async def test_a_line_that_breaks_is_a_lost_node_and_the_call_goes_on(
    bench: Bench, pair: tuple[BenchNode, BenchNode]
) -> None:
    head, tail = pair
    expected = (await bench.run([head, tail], PROMPT, max_tokens=TOKENS)).ids()
    seen = 0

    def on_event(call: Call, event: calls.AnyEvent) -> None:
        nonlocal seen
        if isinstance(event, calls.TokenEvent):
            seen += 1
            if seen == 4:
                line = head.links.get(tail.node_id, tail.address)._outbox._send.__self__  # type: ignore[union-attr]
                line._transport.abort()
        elif isinstance(event, calls.LostNode):
            text = bench.ticket(call.call_id, call.epoch + 1, [head.stage(), tail.stage()])
            head.heads.reroute(call.call_id, calls.Reroute(call.epoch + 1, text, ()))

    answer = await bench.run([head, tail], PROMPT, max_tokens=TOKENS, on_event=on_event)
    (lost,) = answer.of(calls.LostNode)
    assert (lost.node_id, lost.code) == (tail.node_id, "unreachable")
    assert answer.ids() == expected
    assert head.links.get(tail.node_id, tail.address).direct


# ---------------------------------------------------------------- lines without nodes


class End:
    """What came on one end of a line."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.frames: list[pb.Frame] = []
        self.gone: list[str] = []
        self.line: Line | None = None


@asynccontextmanager
async def serving(papers: Papers | None = None) -> AsyncIterator[tuple[LineServer, End, pb.Hello]]:
    """A server with one ticket, and what its greeting says."""
    server, end = LineServer(), End()
    await server.start("127.0.0.1", context=papers.server_context() if papers else None)

    def owner(line: Line) -> None:
        end.line = line
        line.welcome(end.frames.append, end.gone.append, end.outbox)

    hello = pb.Hello(node_id="there", grpc_port=7001, line_port=server.port, line_ticket=server.ticket(owner))
    try:
        yield server, end, hello
    finally:
        await server.stop()
        if end.line is not None:
            end.line.close()


async def dialled(hello: pb.Hello, end: End, dialler: LineDialler | None = None) -> Line | None:
    dialler = dialler or LineDialler()
    return await dialler.dial("127.0.0.1:7001", hello, end.frames.append, end.gone.append)


async def test_frames_go_both_ways_in_order_whatever_their_size() -> None:
    async with serving() as (_, there, hello):
        here = End()
        line = await dialled(hello, here)
        assert line is not None
        line.carry(here.outbox)
        sizes = [1, 0, 3 << 20, 7, 12 << 20, 100]
        for position, size in enumerate(sizes):
            here.outbox.put(pb.Step(position=position, data=bytes(size)))
            there.outbox.put(pb.Credit(upto=position))
        await soon(lambda: sum(len(frame.steps) for frame in there.frames) == len(sizes))
        await soon(lambda: sum(len(frame.credits) for frame in here.frames) == len(sizes))
        steps = [step for frame in there.frames for step in frame.steps]
        assert [(step.position, len(step.data)) for step in steps] == list(enumerate(sizes))
        assert [c.upto for frame in here.frames for c in frame.credits] == list(range(len(sizes)))
        line.close()
        await soon(lambda: there.gone)
        assert here.gone == []


async def test_who_reads_nothing_holds_the_outbox_back() -> None:
    async with serving() as (_, there, hello):
        reader, writer = await asyncio.open_connection("127.0.0.1", hello.line_port)
        writer.write(hello.line_ticket)
        assert await reader.readexactly(4) == bytes(4)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for position in range(48):
            there.outbox.put(pb.Step(position=position, data=bytes(1 << 20)))
        await soon(lambda: there.outbox._held)
        assert there.outbox._waiting
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        positions: list[int] = []
        while len(positions) < 48:
            (length,) = struct.unpack("<I", await reader.readexactly(4))
            frame = pb.Frame.FromString(await reader.readexactly(length))
            positions += [step.position for step in frame.steps]
        assert positions == list(range(48))
        writer.close()
        await soon(lambda: there.gone)


async def test_a_ticket_is_good_once() -> None:
    async with serving() as (_, there, hello):
        first = await dialled(hello, End())
        assert first is not None
        assert await dialled(hello, End()) is None
        assert there.gone == []
        first.close()


async def test_a_wrong_ticket_gets_nothing_and_leaves_the_right_one_good() -> None:
    async with serving() as (_, _, hello):
        wrong = pb.Hello(node_id="there", grpc_port=7001, line_port=hello.line_port)
        wrong.line_ticket = bytes(TICKET_BYTES)
        assert await dialled(wrong, End()) is None
        line = await dialled(hello, End())
        assert line is not None
        line.close()


async def test_silent_strangers_are_bounded_and_put_out() -> None:
    async with serving() as (server, _, hello):
        ends = [await asyncio.open_connection("127.0.0.1", hello.line_port) for _ in range(MAX_STRANGERS + 8)]
        await soon(lambda: len(server._strangers) == MAX_STRANGERS)
        async with asyncio.timeout(30):
            assert [await reader.read() for reader, _ in ends] == [b""] * len(ends)
        assert not server._strangers
        for _, writer in ends:
            writer.close()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), "are taken"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "no frame"),
    ],
    ids=["too long", "no frame"],
)
async def test_what_cannot_be_a_frame_ends_the_line(sent: bytes, why: str) -> None:
    async with serving() as (_, there, hello):
        reader, writer = await asyncio.open_connection("127.0.0.1", hello.line_port)
        writer.write(hello.line_ticket + sent)
        async with asyncio.timeout(30):
            assert await reader.read() == bytes(4)
        (gone,) = there.gone
        assert why in gone
        writer.close()


async def test_where_no_line_can_be_had_is_not_tried_again_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    hello = pb.Hello(node_id="there", grpc_port=7001, line_port=port, line_ticket=bytes(TICKET_BYTES))
    dialler = LineDialler()
    assert await dialled(hello, End(), dialler) is None
    async with serving() as (_, _, good):
        assert await dialled(good, End(), dialler) is None
        line = await dialled(good, End())
        assert line is not None
        line.close()


async def test_with_tls_a_line_is_to_that_node_of_this_mesh_alone() -> None:
    def papers(authority: Authority, node_id: str) -> Papers:
        key = new_key()
        certificate, _ = authority.issue(node_id, make_request(key, node_id))
        return Papers(key, certificate, authority.ca)

    mesh, other = Authority(b"a" * 32, "mesh-a", 3600.0), Authority(b"b" * 32, "mesh-b", 3600.0)
    here = papers(mesh, "here").client_context()
    for who, stands in (
        (papers(mesh, "there"), True),
        (papers(mesh, "somebody else"), False),
        (papers(other, "there"), False),
        (None, False),
    ):
        async with serving(who) as (_, there, hello):
            end = End()
            line = await dialled(hello, end, LineDialler(lambda: here, name_of))
            assert (line is not None) is stands
            if line is not None:
                line.carry(end.outbox)
                end.outbox.put(pb.Step(position=5, data=bytes(100_000)))
                await soon(partial(len, there.frames))
                assert there.frames[0].steps[0].position == 5
                line.close()
