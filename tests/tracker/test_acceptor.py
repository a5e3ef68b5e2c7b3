"""One port for the mesh's machines and for browsers, who see a certificate of the owner's."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from meshnet.protocol.certificates import subject
from meshnet.protocol.keys import TRACKER_NAME, load_key, new_key
from meshnet.tracker.server import Server, StartError
from meshnet.tracker.settings import TrackerSettings


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost, as somebody makes it for their own browser."""
    key = new_key()
    private = load_key(key)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(
            subject("mine"),
            subject("mine"),
            private.public_key(),
            x509.random_serial_number(),
            now - timedelta(hours=1),
            now + timedelta(hours=1),
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(private, hashes.SHA256())
    )
    (folder / "key.pem").write_text(key)
    (folder / "cert.pem").write_text(made.public_bytes(Encoding.PEM).decode())
    return folder / "cert.pem", folder / "key.pem"


async def test_browsers_see_the_owners_certificate_and_machines_the_meshs(tmp_path: Path) -> None:
    certificate, key = own_certificate(tmp_path)
    settings = TrackerSettings(
        host="0.0.0.0",
        port=0,
        grpc_port=0,
        data=tmp_path / "t",
        mdns=False,
        tls_cert=certificate,
        tls_key=key,
    )
    server = Server(settings)
    started = await server.start()
    at = f"localhost:{started.http_port}"
    try:
        assert server._authority is not None
        mesh = server._authority.client_context()
        browser = ssl.create_default_context(cafile=str(certificate))
        async with aiohttp.ClientSession() as http:
            async with http.get(f"https://{at}/dashboard", ssl=browser) as page:
                assert page.status == 200
            async with http.get(f"https://{at}/healthz", ssl=mesh, server_hostname=TRACKER_NAME) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(f"https://{at}/healthz", ssl=browser, server_hostname=TRACKER_NAME)
            # Nothing but the way to HTTPS is to be had in plain.
            async with http.get(f"http://{at}/dashboard", allow_redirects=False) as moved:
                assert (moved.status, moved.headers["location"]) == (308, f"https://{at}/dashboard")
            async with http.post(f"http://{at}/v1/chat/completions", json={}) as refused:
                assert refused.status == 403
                assert (await refused.json())["error"]["code"] == "https_only"
    finally:
        await server.stop()


async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    certificate, key = own_certificate(tmp_path)
    other = tmp_path / "other.pem"
    other.write_text(new_key())
    for cert, its_key, words in (
        (certificate, other, "--tls-cert .* cannot be used"),
        (tmp_path / "none.pem", None, r"none\.pem"),
        (None, key, "--tls-key is there without --tls-cert"),
    ):
        settings = TrackerSettings(port=0, grpc_port=0, data=tmp_path / "t", tls_cert=cert, tls_key=its_key)
        with pytest.raises(StartError, match=words):
            await Server(settings).start()
