"""What one hop between two nodes costs: the frame's way alone, and in a mesh all that is not compute.

Alone: two processes send a 1-token step of SmolLM2 to and fro, by a direct line and by a gRPC stream; half of
the round trip is one way, packing and unpacking included. In a mesh: two nodes with one core and one thread
each, greedy, one stream; what a token takes beyond the stages' engine calls, halved, since a token goes to
the tail and comes back. That holds queueing, sampling, event loops and threads too. Wanted: 0.2 ms one way.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import uvloop
from figures import Spread, Table, parser, ratios
from stand import Endpoint, Node, ask, halves, interleaved, mesh, proposed_cut, request_of, story, two_cores

from meshnet.node.frames import OPTIONS, Outbox
from meshnet.node.lines import LineDialler, LineServer
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.dataplane_pb2_grpc import (
    DataPlaneServicer,
    DataPlaneStub,
    add_DataPlaneServicer_to_server,
)

WANTED_MS = 0.2
N_EMBD = 576
TRIPS = 400


def step() -> pb.Step:
    """One token's hidden state on its way."""
    return pb.Step(session="call-0/0/0", stage=1, position=7, rows=1, dtype="f32", data=bytes(4 * N_EMBD))


class _Echo(DataPlaneServicer):  # type: ignore[misc]
    async def Exchange(self, _requests: Any, context: Any) -> None:  # noqa: N802
        outbox = Outbox()
        pump = asyncio.create_task(outbox.pump(context.write))
        while (frame := await context.read()) is not grpc.aio.EOF:
            for each in frame.steps:
                outbox.put(each)
        pump.cancel()


async def serve() -> None:
    """Sends back what comes, by both ways, until stdin ends."""
    lines, outbox = LineServer(), Outbox()
    await lines.start("127.0.0.1")

    def take(frame: pb.Frame) -> None:
        for each in frame.steps:
            outbox.put(each)

    ticket = lines.ticket(lambda line: line.welcome(take, lambda _why: None, outbox))
    server = grpc.aio.server(options=OPTIONS)
    add_DataPlaneServicer_to_server(_Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(json.dumps({"grpc": port, "line": lines.port, "ticket": ticket.hex()}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


class _Trips:
    """Sends one step after the other and takes down how long each was away."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._back = asyncio.Event()

    def take(self, frame: pb.Frame) -> None:
        if frame.steps:
            self._back.set()

    async def one_way_ms(self) -> float:
        """Of `TRIPS` trips, the median."""
        taken = []
        for _ in range(TRIPS):
            self._back.clear()
            begun = time.perf_counter()
            self._outbox.put(step())
            await self._back.wait()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken) * 1000 / 2


def alone(repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds one way by line and by gRPC, in turns."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        pairs = uvloop.run(_trips(json.loads(child.stdout.readline()), repeats))
        child.communicate()
    return [a for a, _ in pairs], [b for _, b in pairs]


async def _trips(where: dict[str, Any], repeats: int) -> list[tuple[float, float]]:
    lined, called = Outbox(), Outbox()
    by_line, by_grpc = _Trips(lined), _Trips(called)
    hello = pb.Hello(grpc_port=1, line_port=where["line"], line_ticket=bytes.fromhex(where["ticket"]))
    line = await LineDialler().dial("127.0.0.1:1", hello, by_line.take, lambda _why: None)
    assert line is not None
    line.carry(lined)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{where['grpc']}", options=OPTIONS) as channel:
        call = DataPlaneStub(channel).Exchange()

        async def read() -> None:
            while (frame := await call.read()) is not grpc.aio.EOF:
                by_grpc.take(frame)

        tasks = [asyncio.create_task(called.pump(call.write)), asyncio.create_task(read())]
        pairs = [(await by_line.one_way_ms(), await by_grpc.one_way_ms()) for _ in range(repeats + 1)][1:]
        for task in tasks:
            task.cancel()
        call.cancel()
    line.close()
    return pairs


def beyond_compute(end: Endpoint, tokens: int) -> float:
    """Milliseconds per hop that a token takes beyond the engine calls of its stages."""
    (answer,) = ask(end, [request_of(end, story(0), tokens)])
    asked = urllib.request.Request(
        end.base_url.removesuffix("/v1") + "/api/calls", headers={"authorization": f"Bearer {end.key}"}
    )
    with urllib.request.urlopen(asked) as found:
        (call, *_) = json.load(found)["calls"]
    compute = sum(stage["compute_ms"] for stage in call["stages"]) / answer.tokens
    token = (answer.last - answer.first) * 1e3 / (answer.tokens - 1)
    return (token - float(compute)) / 2


def main() -> None:
    if "--serve" in sys.argv:
        uvloop.run(serve())
        return
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=96)
    chosen = options.parse_args()
    table = Table("One hop, milliseconds one way", ["", "direct line", "gRPC", "line / gRPC", "wanted: 0.2"])

    def add(what: str, lines: list[float], calls: list[float]) -> None:
        found = Spread.of(lines)
        verdict = "met" if found.median <= WANTED_MS else "MISSED"
        table.add(what, found.text(), Spread.of(calls).text(), ratios(lines, calls).text(), verdict)

    add("the frame alone, 2.3 kB", *alone(chosen.repeats))
    a, b = two_cores()
    head, tail = halves(proposed_cut(1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = Node.arguments
        by_grpc = (*plain, "--no-lines")
        with interleaved(
            mesh("lines", folder / "lines", [Node(head, a), Node(tail, b)]),
            mesh("gRPC", folder / "grpc", [Node(head, a, 1, by_grpc), Node(tail, b, 1, by_grpc)]),
        ) as ends:
            for end in ends:
                beyond_compute(end, 16)
            rows = [[beyond_compute(end, chosen.tokens) for end in ends] for _ in range(chosen.repeats)]
    add("in a mesh, all beyond compute", [row[0] for row in rows], [row[1] for row in rows])
    table.notes.append(f"cut: layers {head} and {tail}; tracker and client share the two cores")
    table.publish("hop", keep=chosen.keep)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    main()
