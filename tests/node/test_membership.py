"""The line to the tracker, against one that welcomes, refuses, falls silent and goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from meshnet.node.joininfo import JoinFailed, JoinInfo, TrackerGone, meant_for, read_join_info
from meshnet.node.membership import Membership
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.membership_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server

Answer = Callable[[Any, pb.JoinRequest], Any]


@dataclass
class Node:
    """The node's side, which only remembers."""

    credential: str = ""
    token: str = "token"
    directives: list[pb.Directive] = field(default_factory=list)
    welcomes: int = 0
    seen_peers: list[str] = field(default_factory=list)
    serves: str = ""
    kept_trackers: tuple[str, ...] = ()

    def join_request(self, *, with_token: bool) -> pb.JoinRequest:
        back = bool(self.credential) and not with_token
        return pb.JoinRequest(
            node_id="n",
            credential=self.credential if back else "",
            join_token="" if back else self.token,
            mesh_id="m",
        )

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(latency_ms=1.0)

    def welcomed(self, welcome: pb.Welcome) -> None:
        self.welcomes += 1

    def directed(self, directive: pb.Directive) -> None:
        self.directives.append(directive)

    def peers(self, peers: pb.Peers) -> None:
        self.seen_peers = [peer.node_id for peer in peers.peers]

    def serving(self, model: str) -> None:
        self.serves = model

    def other_trackers(self, trackers: tuple[str, ...]) -> None:
        self.kept_trackers = trackers

    def noticed(self, notice: pb.Notice) -> None:
        assert notice.text

    async def prepare(self, tracker: str, info: JoinInfo) -> None:
        assert info.grpc_address

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=options)


class Stub(MembershipServicer):  # type: ignore[misc]
    """A tracker for one test: `answer` says what becomes of a join."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.joins: list[pb.JoinRequest] = []
        self.beats: list[int] = []
        self.messages: list[str] = []
        self.trackers: list[str] = []
        self.mesh_id = "m"

    async def Join(self, _requests: Any, context: Any) -> None:
        first = await context.read()
        self.joins.append(first.join)
        await self.answer(context, first.join)

    async def listen(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.messages.append(message.WhichOneof("kind"))
            if message.HasField("heartbeat"):
                self.beats.append(message.heartbeat.sequence)
                ack = pb.HeartbeatAck(sequence=message.heartbeat.sequence, trackers=self.trackers)
                await context.write(pb.TrackerMessage(ack=ack))


WELCOME = pb.TrackerMessage(welcome=pb.Welcome(mesh_id="m", node_id="n", heartbeat_ms=100, lease_ms=300))


@asynccontextmanager
async def tracker(answer: Answer) -> AsyncIterator[tuple[str, Stub]]:
    stub = Stub(answer)
    server = grpc.aio.server()
    add_MembershipServicer_to_server(stub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        info = {"mesh_id": stub.mesh_id, "grpc_address": f"127.0.0.1:{port}", "trackers": stub.trackers}
        body = json.dumps(info).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    web = await asyncio.start_server(http, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{web.sockets[0].getsockname()[1]}", stub
    finally:
        web.close()
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_joins_beats_reports_and_leaves() -> None:
    async def answer(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(WELCOME)
        await context.write(
            pb.TrackerMessage(directive=pb.Directive(id=7, drain=pb.Drain(on=True, reason="a test")))
        )
        await context.write(pb.TrackerMessage(peers=pb.Peers(peers=[pb.Peer(node_id="other")])))
        await context.write(pb.TrackerMessage(serving=pb.Serving(model="m")))
        await stub.listen(context)

    async with tracker(answer) as (url, stub):
        node = Node()
        membership = Membership(url, node)
        assert not membership.send(pb.NodeMessage(shards=pb.ShardReport()))
        task = asyncio.create_task(membership.run())
        await until(lambda: len(stub.beats) >= 4)
        assert stub.beats == sorted(set(stub.beats))
        assert membership.send(pb.NodeMessage(shards=pb.ShardReport()))
        await until(lambda: "shards" in stub.messages)
        assert [directive.id for directive in node.directives] == [7]
        await until(lambda: node.serves == "m")
        assert node.seen_peers == ["other"]
        await membership.leave("a test")
        await until(lambda: "leaving" in stub.messages)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_refusal_names_the_remedy_and_is_final() -> None:
    async def answer(context: Any, _join: pb.JoinRequest) -> None:
        refused = pb.Refused(code="bad_token", message="the token is unknown", remedy="get another")
        await context.write(pb.TrackerMessage(refused=refused))

    async with tracker(answer) as (url, stub):
        with pytest.raises(JoinFailed, match="the token is unknown; get another"):
            await Membership(url, Node()).run()
        assert len(stub.joins) == 1


async def test_an_old_credential_gives_way_to_the_token() -> None:
    async def answer(context: Any, join: pb.JoinRequest) -> None:
        if join.credential:
            await context.write(pb.TrackerMessage(refused=pb.Refused(code="bad_token", message="old")))
            return
        await context.write(WELCOME)
        await stub.listen(context)

    async with tracker(answer) as (url, stub):
        node = Node(credential="old")
        membership = Membership(url, node)
        task = asyncio.create_task(membership.run())
        await asyncio.wait_for(membership.joined.wait(), 10)
        assert [join.join_token for join in stub.joins] == ["", "token"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_refusal_that_may_pass_is_tried_again() -> None:
    async def answer(context: Any, _join: pb.JoinRequest) -> None:
        if len(stub.joins) < 3:
            refused = pb.Refused(code="duplicate_node", message="still there", retry=True)
            await context.write(pb.TrackerMessage(refused=refused))
            return
        await context.write(WELCOME)
        await stub.listen(context)

    async with tracker(answer) as (url, stub):
        membership = Membership(url, Node())
        task = asyncio.create_task(membership.run())
        await asyncio.wait_for(membership.joined.wait(), 15)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_broken_stream_is_joined_again_at_once() -> None:
    async def answer(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(WELCOME)
        if len(stub.joins) < 3:
            return
        await stub.listen(context)

    async with tracker(answer) as (url, stub):
        node = Node()
        task = asyncio.create_task(Membership(url, node).run())
        await until(lambda: node.welcomes == 3 and bool(stub.beats))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_tracker_that_falls_silent_is_given_up() -> None:
    async def answer(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(WELCOME)
        if len(stub.joins) == 1:
            await asyncio.sleep(30)
        await stub.listen(context)

    async with tracker(answer) as (url, stub):
        node = Node()
        task = asyncio.create_task(Membership(url, node).run())
        await until(lambda: node.welcomes == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_node_whose_tracker_is_gone_goes_to_another_and_back() -> None:
    """Each tracker names the others while the node is there; the one that the user named is kept always."""

    async def stay(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(WELCOME)
        await two.listen(context)

    async def once(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(WELCOME)
        one.trackers = [url_one, url_foreign, url_two]
        if len(one.joins) == 1:
            await asyncio.wait_for(one.listen(context), 0.5)
        await one.listen(context)

    async with tracker(once) as (url_one, one), tracker(stay) as (url_foreign, foreign):
        foreign.mesh_id = "another"
        node = Node()
        membership = Membership(url_one, node)
        task = asyncio.create_task(membership.run())
        async with tracker(stay) as (url_two, two):
            await until(lambda: len(two.joins) == 1 and bool(two.beats))
            assert node.kept_trackers == (url_one, url_foreign, url_two)
            assert not foreign.joins
            two.trackers = [url_two]
            await until(lambda: node.kept_trackers == (url_two,))
        await until(lambda: len(one.joins) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_node_that_starts_while_its_tracker_is_gone_finds_one_that_it_knew() -> None:
    async def answer(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(WELCOME)
        await stub.listen(context)

    async with tracker(answer) as (url, stub):
        membership = Membership("http://127.0.0.1:9", Node(credential="good"), others=[url])
        task = asyncio.create_task(membership.run())
        await asyncio.wait_for(membership.joined.wait(), 10)
        assert stub.joins[0].credential == "good"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_only_the_tracker_that_the_user_named_can_refuse_for_good() -> None:
    async def refuse(context: Any, _join: pb.JoinRequest) -> None:
        await context.write(pb.TrackerMessage(refused=pb.Refused(code="bad_token", message="not you")))

    async with tracker(refuse) as (url, stub):
        task = asyncio.create_task(Membership("http://127.0.0.1:9", Node(), others=[url]).run())
        await until(lambda: len(stub.joins) == 2)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_another_machines_loopback_is_not_dialled() -> None:
    assert meant_for("http://10.0.0.7:8080", "http://10.0.0.9:8080")
    assert meant_for("http://127.0.0.1:8080", "localhost:8080")
    assert not meant_for("http://127.0.0.1:8080", "http://10.0.0.9:8080")
    assert not meant_for("http://[", "http://10.0.0.9:8080")
    assert not meant_for("file:///x", "http://10.0.0.9:8080")


async def test_pauses_grow_to_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 12:
            raise asyncio.CancelledError
        await sleep(0)

    monkeypatch.setattr("meshnet.node.membership.asyncio.sleep", note)
    with pytest.raises(asyncio.CancelledError):
        await Membership("http://127.0.0.1:9", Node(), chance=lambda: 1.0).run()
    assert waits[0] < 0.5
    assert waits == sorted(waits)
    assert waits[-1] == 3.0


async def test_without_retry_it_ends() -> None:
    with pytest.raises(JoinFailed, match=r"cannot reach the tracker at http://127\.0\.0\.1:9"):
        await Membership("http://127.0.0.1:9", Node(), retry=False).run()


def test_addresses_that_are_none() -> None:
    for address in ("ftp://x", "http://", "http://x:port"):
        with pytest.raises(JoinFailed):
            read_join_info(address)
    with pytest.raises(TrackerGone):
        read_join_info("127.0.0.1:9")
