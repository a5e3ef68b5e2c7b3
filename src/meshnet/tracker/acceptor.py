"""One port for TLS and for plain HTTP: the first byte of a connection tells which.

The mesh's own machines speak TLS with the mesh's certificates; browsers and clients, who do not know these,
speak plain, or TLS with a certificate that the owner of the tracker brought.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from meshnet.protocol.keys import TRACKER_NAME

HANDSHAKE = b"\x16"
FIRST_BYTE_S = 15.0
HANDSHAKE_S = 10.0
PAUSE_S = 0.1
"""After a failed accept (no file descriptors left): what is open may end meanwhile."""


class CertificateFiles(Exception):
    """The files of --tls-cert and --tls-key cannot be used."""


class Acceptor:
    """Takes connections of a listening socket and gives each a protocol. `limit`: undecided ones at once."""

    def __init__(
        self,
        listener: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        limit: int,
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._context = context
        self._limit = limit
        self._deciding: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="acceptor")

    def close(self) -> None:
        """Takes no more; what is open goes on."""
        self._accepting.cancel()
        for task in self._deciding:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._deciding, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._deciding) >= self._limit:
                connection.close()
                continue
            task = asyncio.create_task(self._decide(connection))
            self._deciding.add(task)
            task.add_done_callback(self._deciding.discard)

    async def _decide(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        taken = False
        try:
            connection.setblocking(False)
            async with asyncio.timeout(FIRST_BYTE_S):
                await _readable(connection)
            secure = connection.recv(1, socket.MSG_PEEK) == HANDSHAKE
            taken = True
            if secure:
                await loop.connect_accepted_socket(
                    self._factory, connection, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
                )
            else:
                await loop.connect_accepted_socket(self._factory, connection)
        except (TimeoutError, OSError):  # ssl.SSLError is one: a client that does not know our authority
            pass
        finally:
            if not taken:
                connection.close()


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def come() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, come)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


def chosen_context(
    mesh: Callable[[], ssl.SSLContext] | None, certificate: Path | None, key: Path | None
) -> Callable[[], ssl.SSLContext]:
    """The context per connection: the mesh's own for its members, the brought certificate for all others.

    Raises CertificateFiles.
    """
    if certificate is None:
        assert mesh is not None
        return mesh
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise CertificateFiles(
            f"--tls-cert {certificate} and --tls-key {key or certificate} cannot be used: {error}; they must "
            "be a certificate with its chain and its key, as PEM"
        ) from error

    def named(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        if name == TRACKER_NAME and mesh is not None:
            connection.context = mesh()

    context.sni_callback = named
    with contextlib.suppress(NotImplementedError):
        context.set_alpn_protocols(["http/1.1"])
    return lambda: context
