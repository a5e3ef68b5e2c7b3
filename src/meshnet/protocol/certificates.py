"""Certificates within a mesh: whom they name, and what either side of a connection needs to use them.

A mesh has one authority, whose key follows from the mesh's secret; it vouches for trackers, which all have
one name, and for nodes, whose name follows from their id. Addresses are in no certificate: they change.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from meshnet.protocol.keys import CertificateError, load_key, new_key, public_bytes

BACKDATED = timedelta(days=1)
"""Certificates hold from a day before their issue: clocks in a home are not exact."""


def fingerprint(pem: str) -> str:
    """SHA-256 of a certificate's public key in hex. Raises CertificateError."""
    return hashlib.sha256(public_bytes(load_certificate(pem).public_key())).hexdigest()


def load_certificate(pem: str) -> x509.Certificate:
    """Raises CertificateError."""
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except ValueError as error:
        raise CertificateError(f"the certificate cannot be read: {error}") from error


def subject(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def make_request(key_pem: str, node_id: str) -> str:
    """A certificate signing request (PEM); it proves that the key is there."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject(node_id))
    return builder.sign(load_key(key_pem), hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def self_signed(title: str) -> Papers:
    """Papers of an authority of their own, which vouches for nobody."""
    key = new_key()
    now = datetime.now(UTC)
    private = load_key(key)
    builder = x509.CertificateBuilder(
        subject(title),
        subject(title),
        private.public_key(),
        x509.random_serial_number(),
        now - BACKDATED,
        now + BACKDATED,
    )
    certificate = builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    return Papers(key, certificate, certificate)


def check_issued(certificate_pem: str, ca_pem: str, key_pem: str, name: str) -> x509.Certificate:
    """The certificate, if this authority gave it to this key under this name. Raises CertificateError."""
    certificate, ca = load_certificate(certificate_pem), load_certificate(ca_pem)
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateError("the certificate is not of the mesh's authority") from error
    if public_bytes(certificate.public_key()) != public_bytes(load_key(key_pem).public_key()):
        raise CertificateError("the certificate is for another key")
    if name not in names_in(certificate):
        raise CertificateError("the certificate is for another name")
    return certificate


def names_in(certificate: x509.Certificate) -> list[str]:
    """The DNS names of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)


def renewal_due(certificate: x509.Certificate, now: float) -> bool:
    """True from two thirds of its life on. `now`: unix seconds."""
    begins = certificate.not_valid_before_utc + BACKDATED
    ends = certificate.not_valid_after_utc
    return datetime.fromtimestamp(now, UTC) >= ends - (ends - begins) / 3


@dataclass(frozen=True, slots=True)
class Papers:
    """What a process shows of itself, and the authority by which it knows the others; all PEM."""

    key: str = field(repr=False)
    certificate: str
    ca: str

    def configuration(self) -> Any:
        """For `grpc.dynamic_ssl_server_credentials`."""
        pair = (self.key.encode(), self.certificate.encode())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self.ca.encode())

    def channel(self, address: str, name: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A channel to whoever has that name in this mesh, at any address."""
        credentials = grpc.ssl_channel_credentials(
            self.ca.encode(), self.key.encode(), self.certificate.encode()
        )
        named = [*options, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def server_context(self) -> ssl.SSLContext:
        """For HTTP; clients are known by what they send."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """For HTTP to members of this mesh; give the peer's name as the server's host name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.ca)
        self.load_into(context)
        return context

    def member_context(self) -> ssl.SSLContext:
        """For HTTP to whoever is in this mesh, where what is sent proves itself and which member does not
        matter."""
        context = self.client_context()
        context.check_hostname = False
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Gives a context the own certificate; for connections from now on."""
        # ssl reads files only; this one is for us alone (0600) and gone at once.
        handle, name = tempfile.mkstemp(prefix="meshnet-")
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(self.key + self.certificate)
            context.load_cert_chain(name)
        finally:
            Path(name).unlink(missing_ok=True)


def member_credentials(papers: Callable[[], Papers]) -> grpc.ServerCredentials:
    """For a server that only members of the mesh may enter; `papers` gives those of each new connection."""
    return grpc.dynamic_ssl_server_credentials(
        papers().configuration(), lambda: papers().configuration(), require_client_authentication=True
    )
