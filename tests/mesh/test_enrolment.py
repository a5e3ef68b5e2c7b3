"""Certificates: who gets one, by which proof, and that they stay fresh. Tracker and wallet in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from meshnet.node.identity import Identity, Keeper
from meshnet.node.joininfo import JoinFailed, JoinInfo, read_join_info
from meshnet.node.wallet import Wallet
from meshnet.protocol.certificates import check_issued, fingerprint, load_certificate
from meshnet.protocol.keys import name_of, new_key
from meshnet.tracker.authority import Authority
from meshnet.tracker.credential import make_credential
from meshnet.tracker.server import Server
from meshnet.tracker.settings import TrackerSettings

ANYWHERE = "0.0.0.0"  # beyond loopback, so that the mesh speaks TLS


@dataclass
class Stand:
    server: Server
    url: str
    token: str
    folder: Path

    async def info(self) -> JoinInfo:
        return await asyncio.to_thread(read_join_info, self.url)

    def wallet(self, name: str, *, token: str | None = None, pin: str = "") -> tuple[Keeper, Wallet]:
        keeper = Keeper(self.folder / name)
        given = self.token if token is None else token
        return keeper, Wallet(keeper, "http://10.0.0.1:8080", token=given, pin=pin)

    async def enrolled(self, name: str) -> Keeper:
        keeper, wallet = self.wallet(name)
        await wallet.ensure(self.url, await self.info())
        return keeper


@pytest.fixture
async def stand(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    hours = getattr(request, "param", 24.0)
    server = Server(
        TrackerSettings(
            mdns=False, host=ANYWHERE, port=0, grpc_port=0, data=tmp_path / "t", certificate_hours=hours
        )
    )
    started = await server.start()
    assert started.secrets is not None
    try:
        yield Stand(server, f"http://127.0.0.1:{started.http_port}", started.secrets.join_token, tmp_path)
    finally:
        await server.stop()


async def test_a_token_brings_a_certificate_for_an_id_of_ones_own(stand: Stand) -> None:
    keeper = await stand.enrolled("a")
    kept = keeper.identity
    check_issued(kept.certificate, kept.ca, kept.key, name_of(kept.node_id))
    assert fingerprint(kept.ca) == (await stand.info()).ca
    assert stand.token not in (keeper.folder / "node.json").read_text()
    # Another's id, with a good token and a key of one's own.
    thief, wallet = stand.wallet("b")
    thief.keep(Identity(kept.node_id, key=new_key()))
    with pytest.raises(JoinFailed, match="does not belong to this node's key"):
        await wallet.ensure(stand.url, await stand.info())


async def test_a_node_that_was_here_needs_no_token(stand: Stand) -> None:
    assert stand.server.tracker is not None
    mesh = stand.server.tracker.books.mesh
    keeper, wallet = stand.wallet("old", token="")
    old = Identity("node-of-an-earlier-version", mesh.id, key=new_key())
    keeper.keep(old)
    with pytest.raises(JoinFailed, match="there is no join token"):
        await wallet.ensure(stand.url, await stand.info())
    keeper.keep(msgspec.structs.replace(old, credential="mc-guessed"))
    with pytest.raises(JoinFailed, match="credential is not one of mesh"):
        await wallet.ensure(stand.url, await stand.info())
    credential = make_credential(mesh.signing_secret, mesh.id, old.node_id)
    keeper.keep(msgspec.structs.replace(old, credential=credential))
    await wallet.ensure(stand.url, await stand.info())
    assert keeper.identity.certificate


async def test_tokens_and_pins_that_do_not_hold_are_refused(stand: Stand) -> None:
    info = await stand.info()
    for token, pin, words in (
        ("mj-unknown", "", "join token is not one of mesh"),
        (stand.token, "0" * 64, "the join link says 0000000000000000"),
    ):
        _, wallet = stand.wallet(f"n-{words[:9]}", token=token, pin=pin)
        with pytest.raises(JoinFailed, match=words):
            await wallet.ensure(stand.url, info)
    with pytest.raises(JoinFailed, match="speaks no TLS"):
        wallet.check(JoinInfo(info.mesh_id, info.grpc_address))
    # The mesh that the node knows has another authority than the one that answers.
    keeper = await stand.enrolled("c")
    keeper.close()
    _, wallet = stand.wallet("c", token="")
    other = Authority(b"another!" * 4, info.mesh_id, 60.0)
    with pytest.raises(JoinFailed, match="another mesh's tracker, or somebody in between"):
        await wallet.ensure(
            stand.url, JoinInfo(info.mesh_id, info.grpc_address, tls=True, ca=other.fingerprint)
        )


async def test_insecure_takes_both_sides(tmp_path: Path) -> None:
    server = Server(
        TrackerSettings(mdns=False, host=ANYWHERE, insecure=True, port=0, grpc_port=0, data=tmp_path / "t")
    )
    started = await server.start()
    url = f"http://127.0.0.1:{started.http_port}"
    try:
        info = await asyncio.to_thread(read_join_info, url)
        assert (info.tls, info.ca) == (False, "")
        keeper = Keeper(tmp_path / "n")
        plain = Wallet(keeper, "http://10.0.0.1:8080", insecure=True)
        await plain.ensure(url, info)
        assert plain.server_credentials() is None
        assert plain.server_context() is None
        assert not keeper.identity.certificate
        with pytest.raises(JoinFailed, match="start this node with --insecure"):
            await Wallet(keeper, "http://10.0.0.1:8080", token="mj-x").ensure(url, info)
    finally:
        await server.stop()


async def test_all_trackers_of_a_mesh_are_one_authority() -> None:
    one, two = (Authority(b"the mesh" * 4, "m", 60.0) for _ in range(2))
    assert one.ca == two.ca
    assert one.papers().certificate != two.papers().certificate
    assert Authority(b"another!" * 4, "m", 60.0).fingerprint != one.fingerprint


@pytest.mark.parametrize("stand", [3 / 3600], indirect=True)
async def test_certificates_are_renewed_while_the_node_runs(stand: Stand) -> None:
    keeper, wallet = stand.wallet("a")
    info = await stand.info()
    await wallet.ensure(stand.url, info)
    first = keeper.identity.certificate
    assert stand.server.tracker is not None
    renewing = asyncio.create_task(wallet.renew(lambda: (stand.url, info)))
    try:
        async with asyncio.timeout(30):
            while keeper.identity.certificate == first:
                await asyncio.sleep(0.05)
    finally:
        renewing.cancel()
    second = load_certificate(keeper.identity.certificate)
    assert second.not_valid_after_utc > load_certificate(first).not_valid_after_utc
    assert wallet.client_context() is not None
