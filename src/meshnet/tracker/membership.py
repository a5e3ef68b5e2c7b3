"""The membership server: one bidirectional gRPC stream per node, and the probes that the tracker sends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
import structlog

from meshnet.protocol import PROTOCOL_VERSION, dataplane_pb2, dataplane_pb2_grpc, membership_pb2_grpc
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.addresses import bracketed
from meshnet.protocol.keys import name_of
from meshnet.protocol.tls import explained, peer_names
from meshnet.tracker import signals
from meshnet.tracker.credential import check_credential, make_credential
from meshnet.tracker.roster import Roster
from meshnet.tracker.tries import FailedTries
from meshnet.tracker.wire import WireError, read_beat, read_join, read_links, read_shards, text

if TYPE_CHECKING:  # a mesh on loopback has none, and need not load what makes certificates
    from meshnet.tracker.authority import Authority

JOIN_TIMEOUT_S = 10.0
LAST_WORDS_S = 1.0
"""How long a stream that ends may take to send what is still in its outbox."""
OUTBOX = 256
MAX_MESSAGE_BYTES = 4 << 20

log = structlog.get_logger("meshnet.membership")


@dataclass(frozen=True, slots=True)
class Identity:
    """What the tracker says of itself to nodes."""

    mesh_id: str
    secret: bytes
    tracker_id: str
    ticket_public_key: bytes
    heartbeat_ms: int
    lease_ms: int


class Doorman(Protocol):
    """Lets nodes in by join token; raises JoinRefused."""

    async def admit(self, join_token: str, node_id: str) -> None: ...


class JoinRefused(Exception):
    """A join that is not let in; goes to the node as a Refused message."""

    def __init__(self, code: str, message: str, remedy: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.retry = retry


@dataclass(slots=True)
class _Visit:
    """What is known of one stream while it lasts."""

    connection: int
    node_id: str = ""
    reason: str = "its stream to the tracker broke"
    leaving: bool = False


class Membership(membership_pb2_grpc.MembershipServicer):  # type: ignore[misc]
    """Answers `Join`. All decisions are the registry's; this is sockets and authentication."""

    def __init__(
        self,
        roster: Roster,
        identity: Identity,
        doorman: Doorman,
        tries: FailedTries,
        trackers: Callable[[], list[str]],
        *,
        tls: bool = False,
    ) -> None:
        """With `tls` a node's certificate lets it in, and no token; see enrolling.py."""
        self._roster = roster
        self._identity = identity
        self._doorman = doorman
        self._tries = tries
        self._trackers = trackers
        self._tls = tls
        self._connections = count(1)

    async def Join(self, requests: Any, context: Any) -> None:  # noqa: N802 - the name of the RPC
        connection = next(self._connections)
        line = _Stream(context, self._identity)
        visit = _Visit(connection)
        self._roster.attach(connection, line)
        writing = asyncio.create_task(line.write(), name=f"membership-out-{connection}")
        reading = asyncio.create_task(self._read(context, visit, line), name=f"membership-in-{connection}")
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A broken stream counts at once, before anything that could wait.
            self._roster.detach(connection)
            if visit.node_id:
                self._roster.feed(signals.StreamEnded(connection, visit.node_id, visit.reason, visit.leaving))
            line.close()
            reading.cancel()
            await asyncio.wait({reading, writing}, timeout=LAST_WORDS_S)
            writing.cancel()

    async def _read(self, context: Any, visit: _Visit, line: _Stream) -> None:
        """Takes what the node says until it leaves, breaks the rules or is gone."""
        connection = visit.connection
        try:
            await self._admit(context, visit)
            while (message := await context.read()) is not grpc.aio.EOF:
                kind = message.WhichOneof("kind")
                if kind == "leaving":
                    visit.reason = f"it left: {text(message.leaving.reason) or 'stopped'}"
                    visit.leaving = True
                    return
                self._take(kind, message, visit.node_id, connection, line)
        except JoinRefused as refused:
            line.tell(
                signals.Refuse(connection, refused.code, refused.message, refused.remedy, refused.retry)
            )
        except WireError as error:
            visit.reason = f"it sent what cannot be read: {error}"
            line.tell(signals.Refuse(connection, "bad_message", str(error), "upgrade the node"))
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, grpc.aio.UsageError):
            return
        except Exception:
            # Nobody awaits this task's result: without a word the node would be lost for no known reason.
            visit.reason = "the tracker ran into a fault of its own; its log says more"
            log.exception("membership stream failed", node_id=visit.node_id)

    async def _admit(self, context: Any, visit: _Visit) -> None:
        """Authenticates the first message and hands it to the registry, which may refuse it still."""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise JoinRefused(
                "no_join", f"no Join within {JOIN_TIMEOUT_S:.0f} s", "say Join first", retry=True
            ) from None
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "join":
            raise JoinRefused("no_join", "the first message of a node is Join", "say Join first")
        join = first.join
        check_versions(join)
        event = read_join(join, visit.connection, _now_ms())
        if self._tls:
            check_named(join.node_id, peer_names(context))
        else:
            await self._authenticate(join, _address(context.peer()))
        visit.node_id = event.node_id
        self._roster.feed(event)

    async def _authenticate(self, join: pb.JoinRequest, address: str) -> None:
        identity = self._identity
        wait = self._tries.wait_s(address)
        if wait:
            raise JoinRefused(
                "too_many_tries", "too many failed joins from this address", f"wait {wait} s", retry=True
            )
        if join.credential and join.mesh_id and join.mesh_id != identity.mesh_id and not join.join_token:
            raise JoinRefused(
                "wrong_mesh",
                f"the node belongs to mesh {join.mesh_id}, this tracker to {identity.mesh_id}",
                "give the node another data folder (--data) and a join token of this mesh",
            )
        if join.credential and check_credential(
            identity.secret, identity.mesh_id, join.node_id, join.credential
        ):
            return
        if not join.join_token:
            self._tries.failed(address)
            raise JoinRefused(
                "bad_token",
                "the node's credential is not of this mesh" if join.credential else "there is no join token",
                "get one with `meshnet invite` and pass it as --join-token",
            )
        try:
            await self._doorman.admit(join.join_token, join.node_id)
        except JoinRefused as refused:
            if not refused.retry:
                self._tries.failed(address)
            raise

    def _take(
        self, kind: str | None, message: pb.NodeMessage, node_id: str, connection: int, line: _Stream
    ) -> None:
        match kind:
            case "heartbeat":
                beat = message.heartbeat
                self._roster.feed(read_beat(beat, node_id, connection, _now_ms()))
                line.acknowledge(beat.sequence, self._trackers())
            case "shards":
                node = self._roster.state.nodes.get(node_id)
                numerics = node.numerics_class if node is not None else ""
                shards = read_shards(message.shards.shards, numerics)
                self._roster.feed(signals.ShardsChanged(connection, node_id, shards))
            case "links":
                self._roster.feed(signals.LinksMeasured(connection, node_id, read_links(message.links)))
            case "result":
                result = message.result
                if not result.ok:
                    log.warning("directive failed", node_id=node_id, directive=result.id, error=result.error)
                job = line.jobs.pop(result.id, None)
                if job is not None:
                    self._roster.answered(node_id, job, "" if result.ok else text(result.error) or "failed")
            case _:
                raise WireError(f"unexpected message {kind!r} after Join")


def check_versions(join: pb.JoinRequest) -> None:
    """Raises JoinRefused for another protocol, naming which side is older."""
    if join.protocol_version != PROTOCOL_VERSION:
        older = "node" if join.protocol_version < PROTOCOL_VERSION else "tracker"
        raise JoinRefused(
            "protocol_version",
            f"the node speaks protocol {join.protocol_version} (meshnet {join.meshnet_version}), the tracker "
            f"{PROTOCOL_VERSION}",
            f"upgrade the {older}: pip install --upgrade meshnet",
        )


def check_named(node_id: str, names: set[str]) -> None:
    """Raises JoinRefused when the certificate on the stream is not this node's."""
    if name_of(node_id) not in names:
        raise JoinRefused(
            "wrong_certificate",
            f"the certificate on this stream is not that of {node_id}: nobody joins under another's id",
            "give the node a data folder of its own (--data)",
        )


class _Stream:
    """One node's stream. Messages wait in a bounded outbox; a node that does not read them is cut off."""

    def __init__(self, context: Any, identity: Identity) -> None:
        self._context = context
        self._identity = identity
        self._outbox: asyncio.Queue[pb.TrackerMessage | None] = asyncio.Queue(OUTBOX)
        # A node that came back answers here what it was told on an earlier stream, too.
        self._directives = count(secrets.randbits(48))
        self._trackers: list[str] = []
        self._closed = False
        self.jobs: dict[int, int] = {}
        """Directives that somebody waits for, by number: the waiter's own number. At most a few per node."""

    def tell(self, effect: signals.Tell) -> None:
        match effect:
            case signals.Welcome():
                self._put(pb.TrackerMessage(welcome=self._welcome(effect)))
            case signals.Refuse():
                refused = pb.Refused(
                    code=effect.code, message=effect.message, remedy=effect.remedy, retry=effect.retry
                )
                self._put(pb.TrackerMessage(refused=refused))
                self.close()
            case signals.TellCuts():
                self._directive(cuts=pb.UseCuts(model=effect.model, cuts=effect.cuts))
            case signals.TellLoad():
                load = pb.LoadShard(
                    model=effect.model,
                    fingerprint=effect.fingerprint,
                    start_layer=effect.first,
                    end_layer=effect.last,
                    cuts=effect.cuts,
                    sources=effect.sources,
                    files=effect.files,
                    weights_pass=effect.weights_pass,
                    aliases=effect.aliases,
                )
                self.jobs[self._directive(load=load)] = effect.job
            case signals.TellUnload():
                unload = pb.UnloadShard(model=effect.model, start_layer=effect.first, end_layer=effect.last)
                self.jobs[self._directive(unload=unload)] = effect.job
            case signals.TellDrain():
                self._directive(drain=pb.Drain(on=effect.on, reason=effect.reason))
            case signals.TellClose():
                if self._outbox.qsize() > OUTBOX // 2:
                    return  # it ends them by itself after a while; its stream is worth more
                close = pb.CloseCall(call_id=effect.call_id, before_epoch=effect.before_epoch)
                self._directive(close=close)
            case signals.TellServing():
                self._put(pb.TrackerMessage(serving=pb.Serving(model=effect.model)))
            case signals.TellNotice():
                self._put(pb.TrackerMessage(notice=pb.Notice(text=effect.text, remedy=effect.remedy)))
            case signals.TellPeers():
                peers = [pb.Peer(node_id=node_id, grpc_address=at) for node_id, at in effect.peers]
                self._put(pb.TrackerMessage(peers=pb.Peers(peers=peers)))

    def acknowledge(self, sequence: int, trackers: list[str]) -> None:
        """Says that a heartbeat came, and where else the node may go once the list has changed."""
        ack = pb.HeartbeatAck(sequence=sequence)
        if trackers != self._trackers:
            self._trackers = trackers
            ack.trackers.extend(trackers)
        self._put(pb.TrackerMessage(ack=ack))

    def close(self) -> None:
        """Ends the stream once what is in the outbox has gone out."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait(None)

    async def write(self) -> None:
        """Sends what is in the outbox until the stream is closed."""
        while (message := await self._outbox.get()) is not None:
            await self._context.write(message)

    def _welcome(self, effect: signals.Welcome) -> pb.Welcome:
        identity = self._identity
        return pb.Welcome(
            mesh_id=identity.mesh_id,
            node_id=effect.node_id,
            name=effect.name,
            heartbeat_ms=identity.heartbeat_ms,
            lease_ms=identity.lease_ms,
            ticket_public_key=identity.ticket_public_key,
            credential=make_credential(identity.secret, identity.mesh_id, effect.node_id),
            tracker_id=identity.tracker_id,
        )

    def _directive(self, **kind: Any) -> int:
        number = next(self._directives)
        self._put(pb.TrackerMessage(directive=pb.Directive(id=number, **kind)))
        return number

    def _put(self, message: pb.TrackerMessage) -> None:
        if self._closed:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            # It has not read for minutes; its lease will run out, or it comes back on a new stream.
            self._closed = True
            self._context.cancel()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _address(peer: str) -> str:
    """`ipv4:1.2.3.4:567` without the port."""
    return peer.rpartition(":")[0]


async def serve_membership(
    membership: Membership, host: str, port: int, authority: Authority | None
) -> tuple[grpc.aio.Server, int]:
    """Listens; returns the server and the port. Raises OSError when the port cannot be had.

    With an authority only those come in to whom it has given a certificate.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ]
    )
    membership_pb2_grpc.add_MembershipServicer_to_server(membership, server)
    target = f"{bracketed(host)}:{port}"
    try:
        if authority is None:
            bound = server.add_insecure_port(target)
        else:
            from meshnet.protocol.certificates import member_credentials

            bound = server.add_secure_port(target, member_credentials(authority.papers))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {target} for gRPC: {error}") from error
    if bound == 0:
        raise OSError(f"cannot listen on {target} for gRPC")
    await server.start()
    return server, bound


def dial(node_id: str, address: str, authority: Authority | None) -> grpc.aio.Channel:
    """A channel to a node's data plane."""
    # Not the pause that an earlier channel makes after a failure: the node may be back.
    options = [("grpc.use_local_subchannel_pool", 1)]
    if authority is None:
        return grpc.aio.insecure_channel(address, options=options)
    return authority.papers().channel(address, name_of(node_id), options)


async def probe_node(asked: signals.Probe, timeout_s: float, authority: Authority | None = None) -> str:
    """Runs one decode step through the whole shard; empty when it answered, else why not."""
    async with dial(asked.node_id, asked.grpc_address, authority) as channel:
        stub = dataplane_pb2_grpc.DataPlaneStub(channel)
        try:
            reply = await stub.Probe(dataplane_pb2.ProbeRequest(model=asked.model), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name.lower()} at {asked.grpc_address}: {explained(error.details() or '')}"
    return "" if reply.ok else reply.error or "it refused without a reason"
