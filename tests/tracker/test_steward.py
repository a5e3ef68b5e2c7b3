"""Models asked for, over sockets: what an empty node is told, what it may read, what its answer does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.random_gguf import write_random_model
from tracker.conftest import Running, Start
from tracker.wire_node import WireNode

from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile
from meshnet.models.serving import read_spans
from meshnet.models.store import Store
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.passes import PASS_HEADER
from meshnet.tracker.library import Library

LAYERS = 4


class EmptyNode(WireNode):
    """Started without layers of its own; carries nothing out by itself."""

    def join_request(self) -> pb.JoinRequest:
        request = super().join_request()
        del request.shards[:]
        request.placement_wanted = True
        request.n_slots, request.n_ctx, request.read_bytes_per_s = 2, 256, 1e9
        return request

    def heartbeat(self, sequence: int) -> pb.Heartbeat:
        beat = super().heartbeat(sequence)
        del beat.shards[:]
        return beat

    def loads(self) -> list[pb.Directive]:
        return [each for each in self.directives if each.HasField("load")]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "cache"))
    return write_random_model(tmp_path / "tiny.gguf", "llama", n_layers=LAYERS)


async def send(tracker: Running, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with tracker.http.request(
        method, tracker.base + path, json=body, headers=tracker.admin()
    ) as answer:
        return answer.status, await answer.json()


async def state(tracker: Running) -> dict[str, Any]:
    return {each["id"]: each for each in (await tracker.get("/api/placement"))["models"]}


async def test_an_empty_node_is_told_what_to_hold_and_where_it_is(model: Path, tracker: Running) -> None:
    data = await asyncio.to_thread(model.read_bytes)
    assert await send(tracker, "POST", "/api/models", {"model": str(model)}) == (202, {"id": str(model)})
    node = EmptyNode(tracker.join_token)
    tracker.nodes.append(node)
    await node.start(tracker.grpc)
    await tracker.until(lambda: bool(node.loads()))
    load = node.loads()[0].load
    assert (load.start_layer, load.end_layer) == (0, LAYERS - 1)
    assert list(load.sources) == ["/"]
    assert (await state(tracker))["tiny"]["state"] == "placing"
    moves = (await tracker.get("/api/placement"))["moves"]
    assert moves == [{"node": node.name, "action": "load", "model": "tiny", "layers": [0, LAYERS - 1]}]

    base = f"{tracker.base}/weights/{load.fingerprint}"
    entry = {PASS_HEADER: load.weights_pass}
    async with tracker.http.get(base) as answer:
        assert answer.status == 401
    async with tracker.http.get(f"{tracker.base}/weights/{'0' * 64}", headers=entry) as answer:
        assert answer.status == 401
    async with tracker.http.get(base, headers=entry) as answer:
        described = ModelFile.from_manifest(await answer.read())
    assert described.fingerprint == load.fingerprint
    async with tracker.http.get(f"{base}/held", headers=entry) as answer:
        assert read_spans(await answer.read()) == ((0, 0, len(data)),)
    async with tracker.http.get(f"{base}/files/0", headers={**entry, "Range": "bytes=0-99"}) as answer:
        assert (answer.status, await answer.read()) == (206, data[:100])

    number = node.loads()[0].id
    node.say(pb.NodeMessage(result=pb.DirectiveResult(id=number, ok=False, error="the disk is full")))
    await tracker.until(lambda: said(tracker, "cannot load layers 0-3 of tiny: the disk is full"))
    told = (await state(tracker))["tiny"]
    assert told["reason"] is not None
    assert "the disk is full" in told["reason"]
    # It has been decided anew with that in mind, and the node is not asked again.
    assert tracker.server.tracker is not None
    steward = tracker.server.tracker.steward
    await tracker.until(lambda: bool(steward._failed) and steward._looked[0][3] == set(steward._failed))
    assert (await tracker.get("/api/placement"))["moves"] == []
    assert len(node.loads()) == 1


async def test_what_is_asked_for_at_one_tracker_is_placed_by_the_other(
    model: Path, start: Start, tmp_path: Path
) -> None:
    one = await start(data=tmp_path / "shared")
    two = await start(data=tmp_path / "shared", secrets=one)
    assert one.server.tracker is not None
    assert two.server.tracker is not None
    others = two.server.tracker.peers.others
    await two.until(lambda: others() == [one.base])
    node = EmptyNode(one.join_token)
    two.nodes.append(node)
    await node.start(two.grpc)
    assert (await send(one, "POST", "/api/models", {"model": str(model)}))[0] == 202
    await two.until(lambda: bool(node.loads()))
    load = node.loads()[0].load
    assert (load.model, list(load.sources)) == ("tiny", ["/", one.base])
    assert (await state(two))["tiny"]["state"] == "placing"
    # Where its file is on the other's machine alone, the other tells what it is.
    library = Library(Store(tmp_path / "empty"), one.server.tracker.books.mesh.id, key_of(one))
    await library.restore("/gone.gguf", load.fingerprint, (), [one.base])
    described = library.model(load.fingerprint)
    assert described is not None
    assert described.n_layers == LAYERS
    with pytest.raises(ModelError, match="no such file"):
        await library.restore("/gone.gguf", "0" * 64, (), [one.base])


def key_of(tracker: Running) -> Ed25519PrivateKey:
    assert tracker.server.tracker is not None
    return Ed25519PrivateKey.from_private_bytes(tracker.server.tracker.books.mesh.signing_secret)


def said(tracker: Running, text: str) -> bool:
    assert tracker.server.tracker is not None
    events, _ = tracker.server.tracker.recorder.console.since(0, lambda _: True)
    return any(text in str(event) for event in events)


def looks(tracker: Running) -> float:
    """When the steward last decided."""
    assert tracker.server.tracker is not None
    return tracker.server.tracker.steward._looked[1]


async def test_what_cannot_be_loaded_or_named_is_said(model: Path, tracker: Running) -> None:
    node = await tracker.node(name="own", model="toy", aliases=("t",))
    assert (await send(tracker, "POST", "/api/models", {"model": " "}))[0] == 400
    assert (await send(tracker, "POST", "/api/models", {"model": "/no/such.gguf"}))[0] == 202
    await tracker.until(lambda: said(tracker, "/no/such.gguf cannot be loaded"))
    assert (await state(tracker))["/no/such.gguf"]["state"] == "failed"
    assert (await send(tracker, "DELETE", "/api/models/nothing"))[0] == 404
    for alias, name, status in (
        ("toy", "toy", 409),
        ("a b", "toy", 400),
        ("x", "nothing", 404),
        ("x", "t", 200),
    ):
        assert (await send(tracker, "PUT", f"/api/models/aliases/{alias}", {"model": name}))[0] == status
    assert (await send(tracker, "DELETE", "/api/models/aliases/y"))[0] == 404
    answer = await tracker.chat(model="x")
    assert answer.status == 200
    assert (await answer.json())["model"] == "toy"
    # A model of nodes that were started with layers of their own stays where it is.
    looked = looks(tracker)
    assert await send(tracker, "DELETE", "/api/models/x") == (200, {"id": "toy", "held_by": ["own"]})
    await tracker.until(lambda: looks(tracker) > looked)
    assert node.directives == []
    assert (await tracker.chat(model="toy")).status == 200


async def test_what_could_not_be_read_is_forgotten_by_its_whole_name(tracker: Running) -> None:
    assert (await send(tracker, "POST", "/api/models", {"model": "hf:nobody/nothing/none.txt"}))[0] == 202
    await tracker.until(lambda: said(tracker, "hf:nobody/nothing/none.txt cannot be loaded"))
    assert "hf:nobody/nothing/none.txt" in await state(tracker)
    gone = quote("hf:nobody/nothing/none.txt", safe="")
    assert (await send(tracker, "DELETE", f"/api/models/{gone}"))[0] == 200
    assert "hf:nobody/nothing/none.txt" not in await state(tracker)
    assert (await send(tracker, "DELETE", f"/api/models/{gone}"))[0] == 404
