"""Somebody in between: `python -m support.imposter ADDRESS TRACKER_HTTP MESH CA`, run in tests/.

On ADDRESS port 8080 the tracker's HTTP is passed on as it is, port 8081 speaks gRPC with another certificate.
On port 8090 the enrolment is answered by an authority of the imposter's own.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio
import msgspec

from meshnet.protocol.enrolment import EnrolAnswer, EnrolRequest
from meshnet.tracker.authority import Authority


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main(address: str, tracker: str, mesh: str, ca: str) -> None:
    own = Authority(b"imposter" * 4, mesh, 3600)
    host, port = tracker.rsplit(":", 1)

    async def passing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    async def lying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "/api/enroll" in head:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            asked = msgspec.json.decode(await reader.readexactly(length), type=EnrolRequest)
            certificate, _ = own.issue(asked.node_id, asked.csr)
            body = msgspec.json.encode(EnrolAnswer(certificate, own.ca).sealed("a guess", asked.nonce))
        else:
            body = msgspec.json.encode(
                {"mesh_id": mesh, "grpc_address": f"{address}:8081", "tls": True, "ca": ca}
            )
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = grpc.aio.server()
    papers = own.papers()
    server.add_secure_port(
        f"{address}:8081",
        grpc.ssl_server_credentials([(papers.key.encode(), papers.certificate.encode())]),
    )
    await server.start()
    await asyncio.start_server(passing, address, 8080)
    await asyncio.start_server(lying, address, 8090, ssl=own.server_context())
    print('{"ready": true}', flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
