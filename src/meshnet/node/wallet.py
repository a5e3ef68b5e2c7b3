"""A node's certificate: how it gets one, keeps it fresh, and speaks TLS with it. Plain where TLS is off.

A node that was given a join link, has been in a mesh with TLS before, or has its tracker on another machine
insists on TLS; nobody in between can talk it out of that.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import msgspec
import structlog

from meshnet.node.identity import Keeper
from meshnet.node.joininfo import JoinFailed, JoinInfo, TrackerGone, ask, elsewhere
from meshnet.protocol.enrolment import MAX_BYTES, PATH, By, EnrolAnswer, EnrolRequest, key_id, proof_key
from meshnet.protocol.keys import TRACKER_NAME, CertificateError, name_of

if TYPE_CHECKING:  # a mesh on loopback need not load what reads certificates
    import aiohttp

    from meshnet.protocol.certificates import Papers

ENROL_S = 5.0
LOOK_S = 600.0
SHORTEST_LOOK_S = 0.5
INVITE = "get a join link with `meshnet invite` on the tracker's machine"

log = structlog.get_logger()


class Wallet:
    """What a node shows of itself and knows its mesh by. `pin`: the fingerprint in its join link."""

    def __init__(
        self, keeper: Keeper, tracker: str, *, token: str = "", pin: str = "", insecure: bool = False
    ) -> None:
        self._keeper = keeper
        self._token = token
        self._pin = pin
        self._insecure = insecure
        self._papers: Papers | None = None
        self._server_context: ssl.SSLContext | None = None
        self._client: tuple[Papers, ssl.SSLContext] | None = None
        self._tracker = tracker
        self.tls = not insecure and bool(pin or keeper.identity.ca or elsewhere(tracker))

    # ---------------------------------------------------------------- whether and how

    def meet(self, info: JoinInfo) -> None:
        """Before anything listens: on one machine the tracker says whether the mesh speaks TLS."""
        if not self._insecure and not self.tls:
            self.tls = info.tls

    def check(self, info: JoinInfo) -> None:
        """Raises JoinFailed when tracker and node do not agree on TLS, or the tracker is another one."""
        if info.tls and not self.tls:
            help_ = "leave out --insecure" if self._insecure else "start this node again"
            raise JoinFailed(f"the tracker at {self._tracker} speaks TLS, and this node does not; {help_}")
        if not info.tls and self.tls:
            raise JoinFailed(
                f"the tracker at {self._tracker} speaks no TLS: either it was started with --insecure or on "
                "loopback alone, or somebody sits in between. If it is meant so, start this node with "
                "--insecure"
            )
        if self._pin and info.ca != self._pin:
            raise JoinFailed(self._wrong_pin(info.ca))

    async def ensure(self, tracker: str, info: JoinInfo) -> None:
        """Gets a certificate where there is none, or where it is old. Raises JoinFailed and TrackerGone."""
        self.check(info)
        if not self.tls:
            return
        from meshnet.protocol.certificates import fingerprint

        identity = self._keeper.identity
        papers = self._read()
        known = papers is not None and fingerprint(papers.ca) == info.ca
        if papers is not None and known and not self._due(papers):
            return
        if papers is not None and not known and not self._token:
            raise JoinFailed(
                f"at {tracker} there is another mesh's tracker, or somebody in between: its fingerprint is "
                f"{info.ca[:16] or 'missing'}, this node's mesh has {fingerprint(papers.ca)[:16]}; {INVITE}"
            )
        ways: list[tuple[By, str]] = []
        if identity.credential and identity.mesh_id == info.mesh_id:
            ways.append(("credential", identity.credential))
        if self._token:
            ways.append(("token", self._token))
        if not ways:
            raise JoinFailed(f"there is no join token; {INVITE}")
        for by, secret in ways:
            try:
                answer = await asyncio.to_thread(self._enrol, tracker, info, by, secret)
            except JoinFailed:
                if (by, secret) == ways[-1]:
                    raise
            else:
                # Here, where all else is kept: two that write at once would undo each other.
                self._keep(answer)
                return

    def _due(self, papers: Papers) -> bool:
        from meshnet.protocol.certificates import load_certificate, renewal_due

        return renewal_due(load_certificate(papers.certificate), time.time())

    async def renew(self, where: Callable[[], tuple[str, JoinInfo] | None]) -> None:
        """Keeps the certificate fresh while the node runs. `where`: the tracker that it is joined to."""
        while True:
            await asyncio.sleep(self._pause())
            found = where()
            if found is None or self._papers is None or not self._due(self._papers):
                continue
            try:
                await self.ensure(*found)
            except (JoinFailed, TrackerGone, OSError) as error:
                log.warning("certificate not renewed", reason=str(error))

    def _pause(self) -> float:
        """Until the certificate may be due; soon again where it is short-lived."""
        if self._papers is None:
            return SHORTEST_LOOK_S
        from meshnet.protocol.certificates import load_certificate

        left = load_certificate(self._papers.certificate).not_valid_after_utc.timestamp() - time.time()
        return min(LOOK_S, max(SHORTEST_LOOK_S, left / 8))

    def _enrol(self, tracker: str, info: JoinInfo, by: By, secret: str) -> EnrolAnswer:
        """Blocks. Raises JoinFailed and TrackerGone."""
        from meshnet.protocol.certificates import check_issued, fingerprint, make_request

        identity = self._keeper.identity
        key = proof_key(secret, info.mesh_id)
        asked = EnrolRequest(
            identity.node_id,
            by,
            key_id(key) if by == "token" else "",
            make_request(identity.key, identity.node_id),
            secrets.token_hex(16),
        ).sealed(key)
        _, status, body = ask(
            tracker,
            "POST",
            PATH,
            msgspec.json.encode(asked),
            headers={"content-type": "application/json"},
            timeout_s=ENROL_S,
            limit=MAX_BYTES,
        )
        if status != 200:
            raise _refusal(tracker, status, body)
        try:
            answer = msgspec.json.decode(body, type=EnrolAnswer)
        except msgspec.DecodeError as error:
            raise JoinFailed(f"at {tracker} there is no meshnet tracker: {error}") from error
        if not answer.proves(key, asked.nonce):
            raise JoinFailed(
                f"whoever answers at {tracker} does not know the join token: it is not this mesh's tracker, "
                f"or somebody sits in between and has changed its answer; {INVITE}"
            )
        try:
            check_issued(answer.certificate, answer.ca, identity.key, name_of(identity.node_id))
            found = fingerprint(answer.ca)
        except CertificateError as error:
            raise JoinFailed(f"the tracker at {tracker} gave a certificate that is none: {error}") from error
        if self._pin and found != self._pin:
            raise JoinFailed(self._wrong_pin(found))
        log.info("certificate received", authority=found[:16])
        return answer

    def _keep(self, answer: EnrolAnswer) -> None:
        kept = msgspec.structs.replace(self._keeper.identity, certificate=answer.certificate, ca=answer.ca)
        self._keeper.keep(kept)
        self._read()

    def _wrong_pin(self, found: str) -> str:
        return (
            f"the tracker at {self._tracker} has the fingerprint {found[:16] or 'none'}..., the join link "
            f"says {self._pin[:16]}...: it is another mesh, or somebody sits in between; {INVITE}"
        )

    # ---------------------------------------------------------------- TLS with it

    def _read(self) -> Papers | None:
        """The papers on disk, put to use."""
        identity = self._keeper.identity
        if not identity.certificate or not identity.ca:
            return None
        from meshnet.protocol.certificates import Papers

        papers = Papers(identity.key, identity.certificate, identity.ca)
        if papers != self._papers:
            self._papers = papers
            if self._server_context is not None:
                papers.load_into(self._server_context)
        return papers

    def _own(self) -> Papers:
        papers = self._papers or self._read()
        assert papers is not None, "nobody is dialled before the node has its certificate"
        return papers

    def channel(
        self, address: str, node_id: str = "", options: Sequence[tuple[str, Any]] = ()
    ) -> grpc.aio.Channel:
        """A channel to a node, or to a tracker where no node is named."""
        if not self.tls:
            return grpc.aio.insecure_channel(address, options=list(options))
        papers = self._own()
        return papers.channel(address, name_of(node_id) if node_id else TRACKER_NAME, options)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For the data plane: only members of the mesh come in. None: plain."""
        if not self.tls:
            return None
        from meshnet.protocol.certificates import member_credentials

        first = self._read() or _nobody()
        return member_credentials(lambda: self._papers or first)

    def server_context(self) -> ssl.SSLContext | None:
        """For the node's HTTP. None: plain."""
        if not self.tls:
            return None
        if self._server_context is None:
            self._server_context = (self._read() or _nobody()).server_context()
        return self._server_context

    def client_context(self) -> ssl.SSLContext | None:
        """For HTTP to members of the mesh, by `name_of(node_id)` or TRACKER_NAME. None: plain."""
        if not self.tls:
            return None
        papers = self._own()
        if self._client is None or self._client[0] is not papers:
            self._client = papers, papers.client_context()
        return self._client[1]

    def secured(self, url: str) -> str:
        """The address of a member's HTTP, as it is spoken in this mesh: a tracker's port takes both."""
        return url.replace("http://", "https://", 1) if self.tls and url.startswith("http://") else url

    def member_session(self) -> aiohttp.ClientSession:
        """For HTTP to any member of the mesh: weights, which prove themselves by their hashes."""
        import aiohttp

        papers = (self._papers or self._read()) if self.tls else None
        if papers is None:
            return aiohttp.ClientSession()
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=papers.member_context()))


def _nobody() -> Papers:
    """Papers of an authority that dies with them: with these nobody comes in yet."""
    from meshnet.protocol.certificates import self_signed

    return self_signed("no mesh yet")


def _refusal(tracker: str, status: int, body: bytes) -> Exception:
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"it answers with status {status}"
    if status in (408, 429) or status >= 500:
        return TrackerGone(f"the tracker at {tracker}: {message}")
    return JoinFailed(f"the tracker refuses this node: {message}")
