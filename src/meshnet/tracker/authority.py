"""The mesh's certificate authority.

Its key follows from the mesh's signing secret: every tracker of the mesh has the same authority without any
copying, nothing further must be kept secret or backed up, and a join link that pins it holds at all trackers.
Whoever can read the books could let nodes in anyhow.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from meshnet.protocol.certificates import (
    BACKDATED,
    Papers,
    fingerprint,
    load_certificate,
    renewal_due,
    subject,
)
from meshnet.protocol.keys import TRACKER_NAME, CertificateError, load_key, name_of, new_key, public_bytes

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BEGINS = datetime(2020, 1, 1, tzinfo=UTC)
ENDS = datetime(2120, 1, 1, tzinfo=UTC)
TRACKER_LIFE_S = 90 * 86_400.0


class Authority:
    """Vouches for trackers and nodes of one mesh. `node_life_s`: how long a node's certificate holds."""

    def __init__(
        self, secret: bytes, mesh_id: str, node_life_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = _derived(secret)
        self._mesh_id = mesh_id
        self._node_life_s = node_life_s
        self._clock = clock
        self.ca = self._own_certificate()
        self.fingerprint = fingerprint(self.ca)
        self._papers: Papers | None = None
        self._server: tuple[Papers, ssl.SSLContext] | None = None
        self._client: tuple[Papers, ssl.SSLContext] | None = None

    def issue(self, node_id: str, csr_pem: str) -> tuple[str, bytes]:
        """A node's certificate (PEM) and its public key (DER). Raises CertificateError."""
        try:
            csr = x509.load_pem_x509_csr(csr_pem.encode())
        except ValueError as error:
            raise CertificateError(f"the request for a certificate cannot be read: {error}") from error
        key = csr.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError("the request for a certificate has another key than P-256")
        if not csr.is_signature_valid:
            raise CertificateError("the request for a certificate is not signed by its key")
        certificate = self._sign(key, node_id, name_of(node_id), self._node_life_s)
        return certificate, public_bytes(key)

    def papers(self) -> Papers:
        """This tracker's own, renewed in good time."""
        papers = self._papers
        if papers is None or renewal_due(load_certificate(papers.certificate), self._clock()):
            key = new_key()
            certificate = self._sign(load_key(key).public_key(), TRACKER_NAME, TRACKER_NAME, TRACKER_LIFE_S)
            papers = self._papers = Papers(key, certificate, self.ca)
        return papers

    def server_context(self) -> ssl.SSLContext:
        """For HTTP, with the papers of now."""
        papers = self.papers()
        if self._server is None or self._server[0] is not papers:
            self._server = papers, papers.server_context()
        return self._server[1]

    def client_context(self) -> ssl.SSLContext:
        """For HTTP to nodes and other trackers, with the papers of now."""
        papers = self.papers()
        if self._client is None or self._client[0] is not papers:
            self._client = papers, papers.client_context()
        return self._client[1]

    def member_session(self) -> aiohttp.ClientSession:
        """For HTTP to any member of the mesh; see Papers.member_context."""
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.papers().member_context()))

    def _own_certificate(self) -> str:
        """Always the same bytes: fixed times, a serial that follows from the key, no randomness."""
        name = subject(f"meshnet {self._mesh_id}")
        public = self._key.public_key()
        serial = int.from_bytes(hashlib.sha256(public_bytes(public)).digest()[:16], "big") >> 1
        builder = (
            x509.CertificateBuilder(name, name, public, serial, BEGINS, ENDS)
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )
        made = builder.sign(self._key, hashes.SHA256(), ecdsa_deterministic=True)
        return made.public_bytes(Encoding.PEM).decode()

    def _sign(self, public: ec.EllipticCurvePublicKey, title: str, name: str, life_s: float) -> str:
        now = datetime.fromtimestamp(int(self._clock()), UTC)
        issuer = subject(f"meshnet {self._mesh_id}")
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            x509.CertificateBuilder(
                issuer,
                subject(title),
                public,
                x509.random_serial_number(),
                now - BACKDATED,
                now + timedelta(seconds=life_s),
            )
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def _derived(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """The authority's key. 384 bits before the reduction leave no bias that could matter."""
    wide = HKDF(hashes.SHA256(), 48, b"meshnet authority", b"P-256 scalar 1").derive(secret)
    return ec.derive_private_key(int.from_bytes(wide, "big") % (P256_ORDER - 1) + 1, ec.SECP256R1())


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
