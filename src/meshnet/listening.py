"""Ports to listen on, and what to do when one cannot be had."""

from __future__ import annotations

import errno
import socket

BACKLOG = 1024


class CannotListen(OSError):
    """The address and the port, why, and what helps, in one line."""


def listen(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """A listening, non-blocking socket; port 0 takes a free one. Raises CannotListen, which names `flag`."""
    try:
        # A name that is not known here fails in a way of its own, before there is a socket.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name with both kinds, like localhost, the IPv4 address: what prints URLs says 127.0.0.1.
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(_explained(host, port, flag, error)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: a port that is bound only can be bound by another process as well.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(_explained(host, port, flag, error)) from error
    listener.setblocking(False)
    return listener


def check_free(host: str, port: int, *, flag: str) -> None:
    """Raises CannotListen where `listen` would: gRPC does not say why it cannot have a port."""
    listen(host, port, flag=flag).close()


def _explained(host: str, port: int, flag: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        remedy = "this machine has no such address: give one of its own with --host"
    elif error.errno == errno.EADDRINUSE:
        remedy = f"another process uses the port: give another {flag}"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"this user may not open that port: give {flag} a number above 1023"
    else:
        remedy = f"try another {flag} or --host"
    return f"cannot listen on {host}:{port} ({flag}): {error.strerror or error}; {remedy}"
