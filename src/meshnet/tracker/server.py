"""Puts the tracker together, serves it, and takes it down again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import structlog
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet import __version__
from meshnet.listening import check_free, listen
from meshnet.models.store import Store
from meshnet.protocol.addresses import bracketed
from meshnet.tracker.answers import Tracker
from meshnet.tracker.app import Shell
from meshnet.tracker.auth import Authenticator, Sessions
from meshnet.tracker.books.facade import Books, Bootstrap
from meshnet.tracker.books.records import BooksError, BooksUnavailable
from meshnet.tracker.console import Console
from meshnet.tracker.door import FrontDoor
from meshnet.tracker.enrolling import Registrar
from meshnet.tracker.experience import BooksExperience
from meshnet.tracker.feed import Feed
from meshnet.tracker.guarded import guarded
from meshnet.tracker.heads import Heads
from meshnet.tracker.library import Library
from meshnet.tracker.live import LiveTable
from meshnet.tracker.membership import Identity, JoinRefused, Membership, probe_node, serve_membership
from meshnet.tracker.metrics import Metrics
from meshnet.tracker.orchestrator import Orchestrator
from meshnet.tracker.peers import PeerTrackers
from meshnet.tracker.placement import Placement
from meshnet.tracker.recorder import Recorder
from meshnet.tracker.roster import Roster
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.signals import Probe, Rules, Say
from meshnet.tracker.steward import Steward
from meshnet.tracker.tracing import start_tracing
from meshnet.tracker.tries import FailedTries
from meshnet.tracker.tuning import Tuning
from meshnet.tracker.wishes import Wishes

if TYPE_CHECKING:
    import ssl

    from meshnet.tracker.authority import Authority
    from meshnet.tracker.beacon import Beacon

    Contexts = Callable[[], ssl.SSLContext]

GRPC_GRACE_S = 0.5
POLL_S = 0.05

log = structlog.get_logger("meshnet.tracker")


class StartError(Exception):
    """The tracker cannot start; one sentence that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Started:
    """Where the tracker is. `secrets` only when they were made just now."""

    http_port: int
    grpc_port: int
    secrets: Bootstrap | None


class Server:
    """One tracker in this process: `start`, then `stop`."""

    def __init__(self, settings: TrackerSettings) -> None:
        self.settings = settings
        self.tracker: Tracker | None = None
        self._books: Books | None = None
        self._heads: Heads | None = None
        self._tuning: Tuning | None = None
        self._wishes: Wishes | None = None
        self._roster: Roster | None = None
        self._authority: Authority | None = None
        self._beacon: Beacon | None = None
        self._lighting: asyncio.Task[None] | None = None
        self._grpc: grpc.aio.Server | None = None
        self._http: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> Started:
        """Opens books and ports. Raises StartError; nothing is left behind then."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Started:
        settings = self.settings
        with _listening(settings.host, settings.port) as listener:
            books, secrets = await self._open_books(settings)
            tries = FailedTries(settings.failed_keys_per_minute)
            roster = self._roster = Roster(_rules(settings), probe=self._probe)
            tuning = self._tuning = Tuning(books)
            await tuning.start()
            experience = BooksExperience(books)
            placement = Placement(
                roster,
                tuning.of,
                experience,
                queue_length=settings.queue_length,
                queue_length_per_key=settings.queue_length_per_key,
            )
            metrics = Metrics()
            feed = Feed(settings.viewer_outbox)
            console = Console(settings.console_events, books.clock)
            recorder = Recorder(LiveTable(settings.ended_calls), console, feed, metrics, roster)
            recorder.tracing = start_tracing(roster)
            authority = _authority(settings, books)
            self._authority = authority
            registrar = Registrar(authority, books, tries) if authority is not None else None
            contexts = _contexts(settings, authority)
            heads = self._heads = Heads(
                settings.connect_timeout_s, authority.client_context if authority is not None else None
            )
            wishes = self._wishes = Wishes(books)
            await wishes.start()
            shelf = Shelf(roster, wishes)
            library = Library(
                Store(),
                books.mesh.id,
                Ed25519PrivateKey.from_private_bytes(books.mesh.signing_secret),
                authority.member_session if authority is not None else aiohttp.ClientSession,
            )
            orchestrator = Orchestrator(settings, books, roster, shelf, placement, heads, recorder, tuning.of)
            roster.on_say(lambda said: _show(console, said))
            peers = PeerTrackers(
                books,
                roster,
                recorder.table,
                feed,
                _own_url(settings, settings.port or port_of(listener)),
                authority.client_context if authority is not None else None,
            )
            authenticator = Authenticator(
                books, Sessions(books.mesh.signing_secret, settings.session_hours * 3600), tries
            )
            tracker = self.tracker = Tracker(
                settings=settings,
                books=books,
                roster=roster,
                shelf=shelf,
                tuning=tuning,
                orchestrator=orchestrator,
                recorder=recorder,
                feed=feed,
                metrics=metrics,
                authenticator=authenticator,
                experience=experience,
                peers=peers,
                registrar=registrar,
                wishes=wishes,
                library=library,
                steward=Steward(roster, shelf, wishes, library, books.clock, peers.others),
                started_s=int(time.time()),
            )
            door = FrontDoor(settings, authenticator, orchestrator, shelf)
            identity = Identity(
                mesh_id=books.mesh.id,
                secret=books.mesh.signing_secret,
                tracker_id=books.trackers.id,
                ticket_public_key=orchestrator.signer.public_key,
                heartbeat_ms=settings.heartbeat_ms,
                lease_ms=settings.lease_ms,
            )
            membership = Membership(
                roster, identity, _Doorman(books), tries, peers.all_urls, tls=settings.tls
            )
            try:
                check_free(settings.host, settings.grpc_port, flag="--grpc-port")
                self._grpc, tracker.grpc_port = await serve_membership(
                    membership, settings.host, settings.grpc_port, authority
                )
            except OSError as error:
                raise StartError(str(error)) from error
            roster.start()
            self._http = _http_server(settings, Shell(tracker, door), contexts)
            self._serving = asyncio.create_task(self._http.serve([listener]), name="http")
            while not self._http.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.005)
            port = port_of(listener)
        if port != settings.port:
            tracker.settings = settings.model_copy(update={"port": port})
        await books.start(_own_url(settings, port))
        orchestrator.checker.start()
        if settings.mdns and not settings.loopback:
            self._beacon = self._light_beacon(settings, books, port)
        await peers.apply_drains()
        peers.start()
        tracker.steward.start()
        return Started(port, tracker.grpc_port, secrets)

    async def stop(self) -> None:
        """Ends calls (after a moment's grace), streams and ports, then closes the books."""
        if self.tracker is not None:
            self.tracker.stopping = True
            orchestrator = self.tracker.orchestrator
            if self._http is not None:
                for server in getattr(self._http, "servers", []):
                    server.close()
            deadline = time.monotonic() + self.settings.shutdown_s * 0.5
            while orchestrator.running and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            orchestrator.cancel_all("the tracker shuts down; try again")
        if self._beacon is not None and self._lighting is not None:
            self._lighting.cancel()
            await asyncio.gather(self._lighting, return_exceptions=True)
            await self._beacon.stop()
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        if self.tracker is not None:
            await self.tracker.steward.stop()
            await self.tracker.peers.stop()
            await self.tracker.orchestrator.checker.stop()
        if self._roster is not None:
            await self._roster.stop()
        if self.tracker is not None:
            self.tracker.recorder.tell()
            if self.tracker.recorder.tracing is not None:
                await asyncio.to_thread(self.tracker.recorder.tracing.stop)
        if self._grpc is not None:
            await self._grpc.stop(GRPC_GRACE_S)
        if self._tuning is not None:
            await self._tuning.stop()
        if self._wishes is not None:
            await self._wishes.stop()
        if self._heads is not None:
            await self._heads.close()
        if self._books is not None:
            try:
                await self._books.close()
            except BooksUnavailable as error:
                log.warning("the books could not be closed in order", error=error.message)
        self._http = self._serving = self._grpc = self._books = self._heads = None

    def _light_beacon(self, settings: TrackerSettings, books: Books, port: int) -> Beacon:
        from meshnet.tracker.beacon import Beacon

        told = {
            "name": settings.name,
            "mesh": books.mesh.id,
            "tracker": books.trackers.id,
            "tls": "1" if settings.tls or settings.https_only else "0",
            "version": __version__,
        }
        beacon = Beacon(settings.host, port, told)
        self._lighting = asyncio.create_task(beacon.start(), name="beacon")
        return beacon

    async def _open_books(self, settings: TrackerSettings) -> tuple[Books, Bootstrap | None]:
        try:
            books = self._books = await Books.open(settings.database or settings.data)
            return books, await books.bootstrap(renew=settings.new_keys)
        except BooksError as error:
            raise StartError(error.message) from error
        except OSError as error:
            raise StartError(
                f"the data folder {settings.data} cannot be used: {error}; give another --data"
            ) from error

    def _probe(self, asked: Probe) -> asyncio.Task[str]:
        probing = probe_node(asked, self.settings.probe_timeout_s, self._authority)
        return asyncio.create_task(probing, name="probe")


class _Doorman:
    """Join tokens, as the books know them."""

    def __init__(self, books: Books) -> None:
        self._books = books

    async def admit(self, join_token: str, node_id: str) -> None:
        try:
            await self._books.joins.admit(join_token, node_id)
        except BooksUnavailable as error:
            raise JoinRefused("unavailable", error.message, "try again", retry=True) from error
        except BooksError as error:
            code = "expired_token" if "expired" in error.message else "bad_token"
            raise JoinRefused(code, error.message, "get a new token with `meshnet invite`") from error


class _QuietServer(uvicorn.Server):
    """Signals belong to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _SortingServer(_QuietServer):
    """Takes TLS and plain HTTP on the same port."""

    def __init__(self, config: uvicorn.Config, contexts: Contexts) -> None:
        super().__init__(config)
        self._contexts = contexts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        from meshnet.tracker.acceptor import Acceptor

        await super().startup([])
        protocol: Any = self.config.http_protocol_class

        def factory() -> asyncio.Protocol:
            made: asyncio.Protocol = protocol(self.config, self.server_state, self.lifespan.state)
            return made

        assert sockets is not None
        self.servers: Any = [
            Acceptor(listener, factory, self._contexts, protocol.max_connections) for listener in sockets
        ]


def _authority(settings: TrackerSettings, books: Books) -> Authority | None:
    if not settings.tls:
        return None
    # A mesh on loopback need not load what makes certificates.
    from meshnet.tracker.authority import Authority

    mesh = books.mesh
    return Authority(mesh.signing_secret, mesh.id, settings.certificate_hours * 3600)


def _contexts(settings: TrackerSettings, authority: Authority | None) -> Contexts | None:
    """What the HTTP port speaks TLS with; None: it does not. Raises StartError."""
    if settings.tls_key is not None and settings.tls_cert is None:
        raise StartError("--tls-key is there without --tls-cert; give both")
    if authority is None and settings.tls_cert is None:
        return None
    from meshnet.tracker.acceptor import CertificateFiles, chosen_context

    mesh = authority.server_context if authority is not None else None
    try:
        return chosen_context(mesh, settings.tls_cert, settings.tls_key)
    except CertificateFiles as error:
        raise StartError(str(error)) from error


def _http_server(settings: TrackerSettings, app: Any, contexts: Contexts | None) -> uvicorn.Server:
    protocol = guarded(settings.header_timeout_s, settings.max_header_bytes, settings.max_connections)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(settings.idle_connection_s),
        timeout_graceful_shutdown=max(1, int(settings.shutdown_s)),
    )
    return _QuietServer(config) if contexts is None else _SortingServer(config, contexts)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; closed again when what follows fails. Raises StartError."""
    try:
        listener = listen(host, port)
    except OSError as error:
        raise StartError(str(error)) from error
    try:
        yield listener
    except BaseException:
        listener.close()
        raise


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def _own_url(settings: TrackerSettings, port: int) -> str:
    """Where other trackers and nodes reach this one."""
    scheme = "https" if settings.tls or settings.https_only else "http"
    return f"{scheme}://{_dialled(settings)}:{port}"


def _dialled(settings: TrackerSettings) -> str:
    """The host under which other trackers reach this one."""
    anywhere = settings.host in ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound
    host = settings.advertise or (socket.gethostname() if anywhere else settings.host)
    return bracketed(host)


def _rules(settings: TrackerSettings) -> Rules:
    return Rules(
        lease_s=settings.lease_ms / 1000,
        wedge_s=settings.wedge_ms / 1000,
        flap_window_s=settings.flap_window_s,
        flap_free=settings.flap_free,
        flap_pause_s=settings.flap_pause_s,
        flap_pause_max_s=settings.flap_pause_max_s,
    )


def _show(console: Console, said: Say) -> None:
    console.add(said.event, said.line, level=said.level, node_id=said.node_id)
