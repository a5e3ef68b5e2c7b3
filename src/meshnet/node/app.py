"""A node, assembled: servers, shards, membership; from its start to its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
import socket
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import psutil
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from starlette.requests import Request
from starlette.responses import Response

from meshnet import __version__
from meshnet.engine.base import EngineError
from meshnet.engine.hardware import choose_devices, hardware_name
from meshnet.engine.library import load_library
from meshnet.engine.numerics import numerics_class
from meshnet.listening import check_free, listen
from meshnet.models.errors import ModelError
from meshnet.models.remote import RateLimit
from meshnet.models.serving import weight_routes
from meshnet.models.store import Store
from meshnet.node import drafts
from meshnet.node.batching import Policy
from meshnet.node.dataplane import DataPlane, DataPlaneServer
from meshnet.node.directives import Directives
from meshnet.node.fetching import Fetcher
from meshnet.node.headcalls import HeadCalls
from meshnet.node.http import HttpServer, NodeHttp
from meshnet.node.identity import IdentityError, Keeper, default_folder
from meshnet.node.joininfo import JoinFailed, JoinInfo, TrackerGone, elsewhere, read_join_info
from meshnet.node.limits import available_memory, memory_limit, usable_cores
from meshnet.node.lines import LineDialler
from meshnet.node.links import Links
from meshnet.node.loader import EngineOptions, Holding, Loader, LoadError, in_thread, parse_layers, times
from meshnet.node.measure import LinkMeasurer
from meshnet.node.membership import Membership
from meshnet.node.metrics import Metrics
from meshnet.node.rest import Limits, Watch, keep_resting, on_battery
from meshnet.node.ring import SentRing
from meshnet.node.sessions import Refused
from meshnet.node.speed import read_bytes_per_s
from meshnet.node.stages import Stages
from meshnet.node.verify import Verifier
from meshnet.node.wallet import Wallet
from meshnet.node.whereabouts import Whereabouts
from meshnet.process import settle, watch_parent
from meshnet.protocol import PROTOCOL_VERSION
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.addresses import bracketed
from meshnet.protocol.keys import name_of
from meshnet.protocol.passes import PASS_HEADER

PROBED_FIRST_S = 15.0
"""A node waits so long for the tracker's probe before it calls itself ready."""
JOIN_FIRST_S = 2.0
"""A node waits so long for its tracker before it loads: the tracker knows which cuts the mesh uses."""
CUTS_S = 0.05
DRAIN_S = 120.0
SWEEP_S = 0.5
THREAD_END_S = 2.0

log = structlog.get_logger()


class StartError(Exception):
    """The node cannot start or go on; the message says why and what helps."""


@dataclass(frozen=True)
class NodeOptions:
    """What `meshnet node` was asked for. Empty `model`: the tracker may place shards here."""

    tracker: str
    join_token: str = field(default="", repr=False)
    pin: str = ""
    """Fingerprint of the mesh's authority, from the join link."""
    insecure: bool = False
    """No TLS, whatever the tracker's address is."""
    model: str = ""
    layers: str = ""
    name: str = ""
    engine: EngineOptions = field(default_factory=EngineOptions)
    host: str = ""
    port: int = 7000
    grpc_port: int = 7001
    line_port: int = 0
    lines: bool = True
    """Whether frames between nodes may go over direct lines."""
    advertise: str = ""
    advertise_port: int = 0
    advertise_grpc_port: int = 0
    """Ports that others are told to dial, where they differ from those listened on; 0: the same."""
    entry: tuple[int, ...] = ()
    data: Path | None = None
    retry: bool = True
    link_dtype: str = "f32"
    download_limit: float = 0.0
    """Bytes per second that weights may take of the line; 0: all of it."""
    max_gap_ms: float = Policy().max_gap_ms
    rest: Limits | None = None
    """When the node leaves the machine to its owner; None: never."""
    drafts: bool = True
    """Whether heads here guess tokens ahead where links are far."""


class Node:
    """One node process. `run` is everything."""

    def __init__(self, options: NodeOptions, keeper: Keeper, store: Store) -> None:
        self.options = options
        self.node_id = keeper.identity.node_id
        self.draining = False
        self.stop = asyncio.Event()
        self._keeper = keeper
        self._host = options.host or default_host(options.tracker)
        self._boot_id = secrets.randbits(63)
        self._verifier = Verifier()
        self._wallet = Wallet(
            keeper,
            options.tracker,
            token=options.join_token,
            pin=options.pin,
            insecure=options.insecure,
        )
        lines = LineDialler(self._wallet.client_context, name_of) if options.lines else None
        self._links = Links(lambda: self._plane.hello(), self._wallet.channel, lines)
        self._link_dtypes: dict[str, str] = {}
        self.stages = Stages(
            self.node_id,
            self._links,
            self._verifier.verify,
            ring=SentRing(options.engine.replay_buffer),
            policy=Policy(options.max_gap_ms),
            link_dtype=lambda node_id: self._link_dtypes.get(node_id, options.link_dtype),
        )
        limit = RateLimit(options.download_limit) if options.download_limit else None
        self._fetcher = Fetcher(store, limit=limit, mesh_session=self._wallet.member_session)
        self.loader = Loader(self.stages, store, options.engine, self._announce, self._fetcher)
        drafting = drafts.Policy() if options.drafts else drafts.NEVER
        self.heads = HeadCalls(self.stages, self._verifier.verify, self.loader.head_model, drafting)
        self._plane = DataPlane(
            self.node_id,
            lambda: self._verifier.mesh_id,
            self.stages,
            self.heads,
            lambda: self._wallet.tls,
        )
        self._grpc = DataPlaneServer(self._plane)
        metrics = Metrics(self.stages, self._links, lambda: len(self.heads))
        self._http_app = NodeHttp(
            self.node_id,
            self.stages,
            self.heads,
            metrics,
            self.loader.head_model,
            lambda: self.ready,
            weight_routes(self.loader.shelved, self._refuse_weights),
        ).app()
        self._http: HttpServer | None = None
        self.http_port = 0
        self._measurer = LinkMeasurer(self._links_measured, self._wallet.channel)
        self._membership = Membership(
            options.tracker, self, others=keeper.identity.trackers, retry=options.retry
        )
        self._whereabouts = Whereabouts(options.tracker, self._moved)
        self._drained_by_tracker = False
        self._resting = ""
        """Why the node takes no calls just now, with --when idle."""
        self._directives = Directives(self.loader, store, self._fetcher, self._base, self._done)
        self._read_bytes_per_s = 0.0
        self._hurry = asyncio.Event()
        self._serving: set[str] = set()
        self._served = asyncio.Event()
        self._store = store

    # ---------------------------------------------------------------- life

    async def run(self, ready: Callable[[dict[str, Any]], None]) -> None:
        """Starts, serves until `stop` is set, drains and ends. Raises StartError."""
        holdings = await self._plan()
        await self._listen()
        self.stages.executor.start()
        tasks = [
            asyncio.create_task(self._membership.run(), name="membership"),
            asyncio.create_task(self._bring_up(holdings, ready), name="bring up"),
            asyncio.create_task(self._sweep(), name="sweep"),
            asyncio.create_task(self._measurer.run(), name="links"),
            asyncio.create_task(self._directives.run(), name="directives"),
            asyncio.create_task(self._wallet.renew(self._membership.at), name="certificate"),
            asyncio.create_task(watch_parent(self.stop), name="parent"),
        ]
        if elsewhere(self.options.tracker):
            tasks.append(asyncio.create_task(self._whereabouts.run(), name="whereabouts"))
        if self.options.rest is not None:
            resting = keep_resting(self.options.rest, Watch().look, self._rest, time.monotonic)
            tasks.append(asyncio.create_task(resting, name="rest"))
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await self._serve(stopping, tasks)
            await self._drain()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await self._shut_down()

    async def _serve(self, stopping: asyncio.Task[Any], tasks: list[asyncio.Task[None]]) -> None:
        """Until told to stop, or until one of the tasks fails."""
        waiting: set[asyncio.Task[Any]] = {stopping, *tasks}
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                error = task.exception()
                if isinstance(error, JoinFailed | LoadError):
                    raise StartError(str(error)) from error
                if error is not None:
                    raise error
            if stopping in done:
                return

    async def _plan(self) -> list[Holding]:
        """What to load, checked before anything is started. Raises StartError."""
        options = self.options
        try:
            chosen = choose_devices(load_library(), options.engine.device, options.engine.gpu_layers)
            self._numerics = numerics_class(
                load_library(), devices=chosen.names, repack=options.engine.repack
            )
            self._hardware = hardware_name(chosen)
            self._device = chosen.names[0] if chosen.names else "cpu"
            if not options.model:
                engine = options.engine
                threads = engine.threads or len(engine.cores) or usable_cores()
                self._read_bytes_per_s = await in_thread(lambda: read_bytes_per_s(threads, engine.cores))
                return []
            stored = await in_thread(lambda: self._store.pull(options.model))
            model = await in_thread(lambda: self._store.open(stored.id))
            ranges = parse_layers(options.layers or f"0-{model.n_layers - 1}", model.n_layers)
            self.loader.check(model, ranges)
            model = await in_thread(lambda: self._store.identified(model))
        except (EngineError, ModelError, LoadError) as error:
            raise StartError(str(error)) from error
        for cut in options.entry:
            if not any(first <= cut <= last for first, last in ranges):
                raise StartError(f"--entry: layer {cut} is not one of those held ({options.layers})")
        return [
            self.loader.add(stored.id, model, first, last, options.entry, stored.aliases)
            for first, last in ranges
        ]

    async def _listen(self) -> None:
        """Opens the ports. Raises StartError."""
        options = self.options
        await self._meet()
        try:
            listener = listen(self._host, options.port)
            self.http_port = listener.getsockname()[1]
            check_free(self._host, options.grpc_port, flag="--grpc-port")
            await self._grpc.start(self._host, options.grpc_port, self._wallet.server_credentials())
            if options.lines:
                await self._grpc.offer_lines(self._host, options.line_port, self._wallet.server_context())
        except OSError as error:
            raise StartError(str(error)) from error
        self._http = HttpServer(self._http_app, listener, self._wallet.server_context())
        self._http.start()

    def _moved(self, why: str) -> None:
        """The lines that were open lead nowhere: new ones, with what is loaded as it is."""
        log.info("coming back", reason=why)
        self._links.forget(why)
        self._membership.renew(why)

    async def _meet(self) -> None:
        """On one machine the tracker says whether the mesh speaks TLS; one that is not there yet does not."""
        if self._wallet.tls or self.options.insecure:
            return
        with contextlib.suppress(TrackerGone, JoinFailed):
            self._wallet.meet(await asyncio.to_thread(read_join_info, self.options.tracker))

    async def prepare(self, tracker: str, info: JoinInfo) -> None:
        """Before each join: a certificate, where the mesh has them. Raises JoinFailed and TrackerGone."""
        await self._wallet.ensure(tracker, info)

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """To the tracker."""
        return self._wallet.channel(address, options=options)

    async def _bring_up(self, holdings: list[Holding], ready: Callable[[dict[str, Any]], None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_FIRST_S):
                await self._membership.joined.wait()
            await asyncio.sleep(CUTS_S)
        for holding in holdings:
            await self.loader.load(holding)
        await self._membership.joined.wait()
        self._announce()
        await self._grpc.serving(True)
        await self._proven({holding.model_id for holding in holdings})
        ready(self.describe())
        settle()
        if not holdings:
            log.info(
                "no layers yet", next="the tracker places them; `meshnet model load` has it serve a model"
            )
        log.info("node ready", node=self.node_id, http=self.http_url, grpc=self.grpc_address)
        if not holdings:
            # While the tracker looks what to place here.
            await in_thread(self._fetcher.prepare)

    async def _proven(self, models: set[str]) -> None:
        """Until the tracker has had an answer from each model's shards: from then on calls may come."""
        try:
            async with asyncio.timeout(PROBED_FIRST_S):
                while not (models <= self._serving or self.draining):
                    self._served.clear()
                    await self._served.wait()
        except TimeoutError:
            missing = ", ".join(sorted(models - self._serving))
            log.warning("the tracker has had no answer yet", model=missing, dialled=self.grpc_address)

    async def _drain(self) -> None:
        """Finishes what runs, and takes nothing new; a second stop ends it at once."""
        self.draining = self.stages.draining = True
        self._announce()
        await self._grpc.serving(False)
        deadline = time.monotonic() + DRAIN_S
        if self.busy:
            log.info("draining", sessions=len(self.stages.sessions), calls=len(self.heads))
        while self.busy and not self._hurry.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._hurry.wait()
        await self._membership.leave("stopped")

    async def _shut_down(self) -> None:
        await self._directives.stop()
        await self.heads.stop()
        for session in list(self.stages.sessions.values()):
            session.upstream.lost(session, self.node_id, "closed", "the node stops")
            self.stages.discard(session)
        if self._http is not None:
            await self._http.stop()
        await self._grpc.stop(0.1)
        await self._links.stop()
        executor = self.stages.executor
        if executor.running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(THREAD_END_S):
                    await self.loader.close()
        executor.stop()
        executor.join(THREAD_END_S)
        self._keeper.close()

    def interrupt(self) -> None:
        """A signal to stop: the first drains, the second ends at once."""
        if self.stop.is_set():
            self._hurry.set()
        self.stop.set()

    @property
    def busy(self) -> bool:
        """Whether calls run here; sessions that wait for another attempt do not count."""
        return len(self.heads) > 0 or any(s.parked_at is None for s in self.stages.sessions.values())

    @property
    def ready(self) -> bool:
        """Everything is loaded, and it takes calls."""
        held = self.loader.holdings
        return bool(held) and all(holding.state == "ready" for holding in held) and not self.draining

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.stages.sweep(time.monotonic())

    # ---------------------------------------------------------------- what the node says of itself

    @property
    def address(self) -> str:
        """The host that others dial."""
        if self.options.advertise:
            return self.options.advertise
        if self._host not in ("0.0.0.0", "::"):  # noqa: S104 - recognised, not bound
            return self._host
        return self._whereabouts.address

    @property
    def http_url(self) -> str:
        scheme = "https" if self._wallet.tls else "http"
        return f"{scheme}://{bracketed(self.address)}:{self.options.advertise_port or self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{bracketed(self.address)}:{self.options.advertise_grpc_port or self._grpc.port}"

    def describe(self) -> dict[str, Any]:
        """The ready line of `--json`."""
        return {
            "node_id": self.node_id,
            "name": self._name,
            "http_url": self.http_url,
            "grpc_address": self.grpc_address,
            "layers": [[holding.first, holding.last] for holding in self.loader.holdings],
            "pid": os.getpid(),
        }

    @property
    def _name(self) -> str:
        return self.options.name or socket.gethostname()

    def join_request(self, *, with_token: bool) -> pb.JoinRequest:
        identity = self._keeper.identity
        back = bool(identity.credential) and not with_token
        memory = psutil.virtual_memory().total
        return pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            meshnet_version=__version__,
            engine_version=f"{load_library().provider}-{load_library().version}",
            node_id=self.node_id,
            name=self._name,
            # With TLS the certificate lets it in: neither is shown to anybody.
            join_token="" if back or self._wallet.tls else self.options.join_token,
            credential=identity.credential if back and not self._wallet.tls else "",
            mesh_id=identity.mesh_id if back else "",
            http_url=self.http_url,
            grpc_address=self.grpc_address,
            hardware=pb.Hardware(
                name=self._hardware,
                os=f"{platform.system()} {platform.release()}",
                cores=usable_cores(),
                memory_bytes=memory,
                device=self._device,
            ),
            shards=self.loader.announce(draining=self.draining),
            numerics_class=self._numerics,
            memory_limit_bytes=self.options.engine.memory or memory_limit() or memory,
            memory_free_bytes=available_memory(),
            boot_id=self._boot_id,
            placement_wanted=not self.options.model,
            n_slots=self.options.engine.n_slots,
            n_ctx=self.options.engine.n_ctx or 0,
            reserved_bytes=self.options.engine.replay_buffer,
            read_bytes_per_s=self._read_bytes_per_s,
        )

    def heartbeat(self) -> pb.Heartbeat:
        stages, state = self.stages, self.stages.state
        load = stages.executor.load()
        beat = pb.Heartbeat(
            latency_ms=state.latency_ms,
            current_load=state.current_load,
            served_requests=state.counters.served,
            failed_requests=state.counters.failed,
            progress=load.steps,
            waiting_steps=load.waiting,
            oldest_step_ms=load.oldest_ms,
            memory_free_bytes=available_memory(),
            unix_ms=int(time.time() * 1000),
            on_battery=on_battery(),
            resting=self._resting,
        )
        # While a shard makes way for another one of the same layers, the new one stands in front.
        current = {(s.model, s.info.first, s.info.last): s for s in reversed(stages.shards)}
        for shard in current.values():
            held = sorted({s.call_id for s in stages.sessions.values() if s.shard is shard})
            beat.shards.append(
                pb.ShardHealth(
                    model=shard.model,
                    start_layer=shard.info.first,
                    end_layer=shard.info.last,
                    free_slots=shard.free_slots,
                    free_kv_tokens=shard.free_slots * shard.info.n_ctx,
                    queue_ms=load.queue_ms,
                    times=times(state.live_test(shard)),
                    ready=shard.accepts and not self.draining,
                    sessions=held[: shard.info.n_slots],
                )
            )
        return beat

    def _announce(self) -> None:
        report = pb.ShardReport(shards=self.loader.announce(draining=self.draining))
        self._membership.send(pb.NodeMessage(shards=report))

    def _links_measured(self, links: Sequence[pb.LinkTime]) -> None:
        for link in links:
            if link.error:
                log.warning("peer out of reach", peer=link.peer, reason=link.error)
            else:
                self.stages.state.note_link(link.peer, link.ms)
        self._membership.send(pb.NodeMessage(links=pb.LinkReport(links=links)))

    # ---------------------------------------------------------------- what the tracker says

    def welcomed(self, welcome: pb.Welcome) -> None:
        key = Ed25519PublicKey.from_public_bytes(welcome.ticket_public_key)
        self._verifier.use(welcome.mesh_id, key)
        kept = self._keeper.identity
        credential = welcome.credential or kept.credential
        fresh = msgspec.structs.replace(kept, mesh_id=welcome.mesh_id, credential=credential)
        if fresh != kept:
            self._keeper.keep(fresh)
        log.info("joined", mesh=welcome.mesh_id, name=welcome.name)

    def peers(self, peers: pb.Peers) -> None:
        self._link_dtypes = {peer.node_id: peer.dtype for peer in peers.peers if peer.dtype}
        self._measurer.use(
            {peer.node_id: peer.grpc_address for peer in peers.peers if peer.node_id != self.node_id}
        )

    def serving(self, model: str) -> None:
        self._serving.add(model)
        self._served.set()

    def noticed(self, notice: pb.Notice) -> None:
        log.warning(notice.text, remedy=notice.remedy)

    def other_trackers(self, trackers: tuple[str, ...]) -> None:
        self._keeper.keep(msgspec.structs.replace(self._keeper.identity, trackers=trackers))

    def directed(self, directive: pb.Directive) -> None:
        kind = directive.WhichOneof("kind")
        if kind == "close":
            self.heads.end_attempts(directive.close.call_id, directive.close.before_epoch)
            self.stages.close_call(directive.close.call_id, directive.close.before_epoch)
            self._done(directive, "")
        elif kind == "drain":
            log.info("drain", on=directive.drain.on, reason=directive.drain.reason)
            self._drained_by_tracker = directive.drain.on
            self._set_draining()
            self._done(directive, "")
        else:
            self._directives.put(directive)

    def _set_draining(self) -> None:
        if not self.stop.is_set():
            self.draining = self.stages.draining = self._drained_by_tracker or bool(self._resting)
            self._served.set()
            self._announce()

    def _rest(self, why: str) -> None:
        """Calls that run are finished; what is loaded stays."""
        log.info("resting" if why else "working again", reason=why or "the machine is idle")
        self._resting = why
        self._set_draining()

    def _base(self, source: str) -> str:
        """The base URL of a source; "/" is the tracker that this node is a member at."""
        return self._wallet.secured(self._membership.tracker if source == "/" else source).rstrip("/")

    def _refuse_weights(self, request: Request, fingerprint: str) -> Response | None:
        try:
            self._verifier.check_pass(request.headers.get(PASS_HEADER, ""), fingerprint)
        except Refused as refused:
            return Response(refused.message, 401, media_type="text/plain")
        return None

    def _done(self, directive: pb.Directive, error: str) -> None:
        result = pb.DirectiveResult(id=directive.id, ok=not error, error=error)
        self._membership.send(pb.NodeMessage(result=result))


def make_node(options: NodeOptions, store: Store | None = None) -> Node:
    """A node on its data folder. Inside a running event loop. Raises StartError."""
    folder = options.data or default_folder(name_and_port(options.name, options.port))
    try:
        keeper = Keeper(folder)
    except IdentityError as error:
        raise StartError(str(error)) from error
    return Node(options, keeper, store or Store())


def name_and_port(name: str, port: int) -> str:
    """What the data folder of a node without --data is called."""
    return f"{name or socket.gethostname()}-{port}"


def default_host(tracker: str) -> str:
    """Loopback for a tracker on this machine's loopback, else all interfaces."""
    url = urllib.parse.urlsplit(tracker if "//" in tracker else f"http://{tracker}")
    if url.hostname in ("127.0.0.1", "localhost", "::1"):
        return "127.0.0.1"
    return "0.0.0.0"  # noqa: S104 - other machines dial it
