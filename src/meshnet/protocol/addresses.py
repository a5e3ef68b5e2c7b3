"""Addresses as they stand in URLs, and whether they are this machine's own."""

from __future__ import annotations

import urllib.parse


def bracketed(host: str) -> str:
    """An IPv6 address as it stands in a URL; other hosts as they are."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def loopback_host(host: str) -> bool:
    """Whether a host, without brackets, is this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def loopback(url: str) -> bool:
    """The same of a URL or HOST:PORT. Raises ValueError for what is no address."""
    return loopback_host(urllib.parse.urlsplit(url if "//" in url else f"//{url}").hostname or "")
