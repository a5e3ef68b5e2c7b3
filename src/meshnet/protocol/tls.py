"""What RPCs tell of TLS: who the peer has proven to be, and why a connection failed."""

from __future__ import annotations

from typing import Any


def peer_names(context: Any) -> set[str]:
    """The names in the certificate with which the peer of an RPC has proven itself; empty without TLS."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return {name.decode("ascii", "replace") for name in found}


def is_refused_by_tls(details: str) -> bool:
    """True when the peer has shown a certificate that is not of this mesh, or not its own."""
    return "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification Check failed" in details


def explained(details: str) -> str:
    """What gRPC says of a failed connection, in words where TLS was the reason; else as it is."""
    if is_refused_by_tls(details):
        return (
            "there answers somebody with another certificate than this mesh's: it belongs to another mesh, "
            "or somebody sits in between (or the clocks differ by more than a day)"
        )
    if "handshake failed" in details or "SSL_ERROR" in details:
        return f"no TLS connection: one side speaks plain, or refuses this one's certificate ({details})"
    return details
