"""What somebody on the LAN may try: `python -m support.intruder DATA_PLANE MEMBERSHIP OWN VICTIM MESH`.

OWN and VICTIM are the node.json of two nodes: the intruder has the papers of the first. Prints what it was
told, as JSON by try.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpc.aio

from meshnet.protocol import PROTOCOL_VERSION
from meshnet.protocol import dataplane_pb2 as data
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.certificates import Papers, make_request
from meshnet.protocol.dataplane_pb2_grpc import DataPlaneStub
from meshnet.protocol.keys import TRACKER_NAME, name_of, new_key
from meshnet.protocol.membership_pb2_grpc import MembershipStub
from meshnet.tracker.authority import Authority


async def _health(channel: grpc.aio.Channel) -> str:
    async with channel:
        try:
            answer = await DataPlaneStub(channel).Health(data.HealthRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return f"let in: {answer.node_id}"


async def _hello(channel: grpc.aio.Channel, node_id: str, mesh: str) -> str:
    async with channel:
        call = DataPlaneStub(channel).Exchange()
        hello = data.Hello(node_id=node_id, protocol_version=PROTOCOL_VERSION, mesh_id=mesh)
        try:
            await call.write(data.Frame(hello=hello))
            first: Any = await call.read()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "ended" if first is grpc.aio.EOF else f"let in by {first.hello.node_id}"


async def _join(channel: grpc.aio.Channel, node_id: str) -> str:
    async with channel:
        call = MembershipStub(channel).Join()
        join = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            node_id=node_id,
            http_url="https://10.77.0.9:1",
            grpc_address="10.77.0.9:2",
        )
        try:
            await call.write(pb.NodeMessage(join=join))
            first: Any = await call.read()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return f"{first.refused.code}: {first.refused.message}" if first.HasField("refused") else "let in"


async def main(
    plane: str, membership: str, mine: dict[str, str], theirs: dict[str, str], mesh: str
) -> dict[str, str]:
    papers = Papers(mine["key"], mine["certificate"], mine["ca"])
    name = name_of(theirs["node_id"])
    key = new_key()
    other, _ = Authority(b"another!" * 4, mesh, 3600).issue(
        mine["node_id"], make_request(key, mine["node_id"])
    )
    foreign = Papers(key, other, mine["ca"])
    return {
        "plain": await _health(grpc.aio.insecure_channel(plane)),
        "plain membership": await _join(grpc.aio.insecure_channel(membership), mine["node_id"]),
        "own": await _health(papers.channel(plane, name)),
        "foreign": await _health(foreign.channel(plane, name)),
        "foreign membership": await _join(foreign.channel(membership, TRACKER_NAME), mine["node_id"]),
        "own hello": await _hello(papers.channel(plane, name), mine["node_id"], mesh),
        "stolen hello": await _hello(papers.channel(plane, name), "node-of-somebody-else", mesh),
        "stolen join": await _join(papers.channel(membership, TRACKER_NAME), theirs["node_id"]),
    }


if __name__ == "__main__":
    at, tracker, *files, name = sys.argv[1:6]
    own, victim = (json.loads(Path(file).read_text()) for file in files)
    print(json.dumps(asyncio.run(main(at, tracker, own, victim, name))))
