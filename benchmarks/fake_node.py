"""A node that computes nothing, for measuring the tracker: it speaks the real wire and answers at once.

It joins a tracker (gRPC membership, answers the Probe), serves `/internal/calls` with events, and, for
comparison, the same answers as an OpenAI endpoint of its own under `/v1`. Two models: `fake` sends a token
at once and then one every --interval-ms; `fake-fast` writes as fast as the reader reads. As many tokens as
the request's max_tokens. One JSON line on stdout when it has joined.

HTTP is handled on bare asyncio protocols, so that little of the machine goes into what is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc.aio
import msgspec
import uvloop

from meshnet.protocol import PROTOCOL_VERSION, dataplane_pb2, dataplane_pb2_grpc, membership_pb2_grpc
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.calls import (
    EVENTS_MEDIA_TYPE,
    ChoiceEnd,
    Done,
    GenerateCall,
    Opened,
    TokenCount,
    TokenEvent,
    encode_event,
)

LAYERS = 30
SLOTS = 512
N_CTX = 1 << 20
BURST = 16
"""Events that `fake-fast` writes between two looks at whether the reader keeps up."""
decode_call = msgspec.json.Decoder(GenerateCall).decode


def openai_chunk(model: str, text: str | None, finish: str | None = None) -> bytes:
    """One chunk as OpenAI sends it."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Answer:
    """What one request is answered with: the token at `index`, and what stands before and after them."""

    def __init__(self, kind: str, model: str, tokens: int) -> None:
        self.media_type = EVENTS_MEDIA_TYPE if kind == "node" else "text/event-stream"
        self.tokens = tokens
        self.token: Callable[[int], bytes]
        if kind == "node":
            self.head = encode_event(Opened(5)) + b"\n"
            self.token = lambda index: encode_event(TokenEvent(0, (index,), f" t{index}")) + b"\n"
            ends = (ChoiceEnd(0, "length", "limit"), Done(5, tokens))
            self.tail = b"".join(encode_event(event) + b"\n" for event in ends)
        else:
            self.head = b""
            self.token = lambda index: openai_chunk(model, f" t{index}")
            self.tail = openai_chunk(model, None, "length") + b"data: [DONE]\n\n"


class Connection(asyncio.Protocol):
    """HTTP/1.1 with content-length in and chunked out; one request at a time."""

    interval_s = 0.02

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._answer: Answer | None = None
        self._index = 0
        self._begun = 0.0
        self._timer: asyncio.Handle | None = None
        self._paused = False
        self._fast = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._fast and self._answer is not None:
            self._flood()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        sizes = [line.split(":", 1)[1] for line in lines if line.lower().startswith("content-length:")]
        size = int(sizes[0]) if sizes else 0
        if len(body) < size:
            return
        self._buffer = body[size:]
        self._serve(lines[0].split()[1], body[:size])

    def _serve(self, path: str, body: bytes) -> None:
        assert self._transport is not None
        if path == "/internal/tokenize":
            self._whole(msgspec.json.encode(TokenCount(5)))
        elif path == "/internal/calls":
            call = decode_call(body)
            self._begin(Answer("node", call.model, call.max_tokens), call.model)
        elif path == "/v1/chat/completions":
            asked = json.loads(body)
            self._begin(Answer("openai", asked["model"], asked["max_tokens"]), asked["model"])
        else:
            self._whole(b'{"object": "list", "data": []}')

    def _whole(self, body: bytes) -> None:
        assert self._transport is not None
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _begin(self, answer: Answer, model: str) -> None:
        assert self._transport is not None
        self._answer, self._index = answer, 0
        self._fast = model.endswith("fast")
        self._begun = asyncio.get_running_loop().time()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {answer.media_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head.encode() + (_chunked(answer.head) if answer.head else b""))
        if self._fast:
            self._flood()
        else:
            self._tick()

    def _tick(self) -> None:
        """One token, and the next one a whole interval after the last was due."""
        assert self._answer is not None
        assert self._transport is not None
        self._transport.write(_chunked(self._answer.token(self._index)))
        self._index += 1
        if self._index == self._answer.tokens:
            self._end()
            return
        due = self._begun + self._index * self.interval_s
        self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _flood(self) -> None:
        assert self._answer is not None
        answer = self._answer
        for _ in range(BURST):
            if self._paused or self._transport is None:
                return
            self._transport.write(_chunked(answer.token(self._index)))
            self._index += 1
            if self._index == answer.tokens:
                self._end()
                return
        self._timer = asyncio.get_running_loop().call_soon(self._flood)

    def _end(self) -> None:
        assert self._answer is not None
        assert self._transport is not None
        self._transport.write(_chunked(self._answer.tail) + b"0\r\n\r\n")
        self._answer = None


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Data(dataplane_pb2_grpc.DataPlaneServicer):  # type: ignore[misc]
    """Only the Probe, by which a tracker proves a node before it routes to it."""

    async def Probe(self, request: Any, context: Any) -> dataplane_pb2.ProbeReply:  # noqa: N802 - gRPC's
        return dataplane_pb2.ProbeReply(ok=True, ms=1.0)


def times() -> pb.Times:
    return pb.Times(decode_ms_per_layer=0.01, prefill_ms_per_token_layer=0.001, embed_ms=0.01, output_ms=0.01)


def shard(model: str) -> pb.Shard:
    return pb.Shard(
        model=model,
        fingerprint=(model.encode().hex() * 64)[:64],
        arch="llama",
        start_layer=0,
        end_layer=LAYERS - 1,
        model_layers=LAYERS,
        entry_layers=[0],
        n_slots=SLOTS,
        n_ctx=N_CTX,
        n_embd=64,
        times=times(),
        capacity_score=100.0,
        state="ready",
        progress=1.0,
        numerics_class="none",
        memory_bytes=1 << 20,
        card=pb.ModelCard(name=model, n_ctx_train=N_CTX, n_vocab=50_000, quantisation="none", bytes=1),
    )


def health(model: str) -> pb.ShardHealth:
    return pb.ShardHealth(
        model=model,
        start_layer=0,
        end_layer=LAYERS - 1,
        free_slots=SLOTS,
        free_kv_tokens=SLOTS * N_CTX,
        times=times(),
        ready=True,
    )


MODELS = ("fake", "fake-fast")


async def member(tracker: str, token: str, http_url: str, grpc_address: str) -> None:
    """Joins, says so on stdout, and sends heartbeats until the tracker goes away."""
    welcomed = asyncio.Event()

    async def messages() -> AsyncIterator[pb.NodeMessage]:
        join = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            meshnet_version="0.1.0",
            engine_version="none",
            node_id="fake-node",
            name="fake",
            join_token=token,
            http_url=http_url,
            grpc_address=grpc_address,
            hardware=pb.Hardware(name="none", os="none", cores=1, memory_bytes=1 << 30, device="none"),
            shards=[shard(model) for model in MODELS],
            numerics_class="none",
            memory_limit_bytes=1 << 30,
            memory_free_bytes=1 << 30,
            boot_id=1,
        )
        yield pb.NodeMessage(join=join)
        await welcomed.wait()
        for sequence in itertools.count(1):
            beat = pb.Heartbeat(
                sequence=sequence,
                shards=[health(model) for model in MODELS],
                progress=sequence,
                memory_free_bytes=1 << 30,
            )
            yield pb.NodeMessage(heartbeat=beat)
            await asyncio.sleep(1.0)

    async with grpc.aio.insecure_channel(tracker) as channel:
        stream = membership_pb2_grpc.MembershipStub(channel).Join(messages())
        async for message in stream:
            kind = message.WhichOneof("kind")
            if kind == "refused":
                raise SystemExit(f"refused: {message.refused.message} {message.refused.remedy}")
            if kind == "welcome":
                welcomed.set()
                sys.stdout.write(json.dumps({"http_url": http_url, "base_url": f"{http_url}/v1"}) + "\n")
                sys.stdout.flush()


async def run(arguments: argparse.Namespace) -> None:
    Connection.interval_s = arguments.interval_ms / 1000
    loop = asyncio.get_running_loop()
    http = await loop.create_server(Connection, "127.0.0.1", 0, backlog=1024)
    server = grpc.aio.server()
    dataplane_pb2_grpc.add_DataPlaneServicer_to_server(Data(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    url = f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}"
    try:
        await member(arguments.tracker, arguments.token, url, f"127.0.0.1:{port}")
    finally:
        http.close()
        await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tracker", required=True, help="gRPC address of the tracker, HOST:PORT")
    parser.add_argument("--token", required=True, help="join token")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="between two tokens (default 20)")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
