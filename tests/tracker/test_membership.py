"""Joining, leaving, losing and finding nodes again, over real gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tracker.conftest import Running, Start
from tracker.wire_node import WireNode

from meshnet.protocol import membership_pb2 as pb
from meshnet.tracker.wire import WireError, read_join


async def refused(tracker: Running, node: WireNode) -> str:
    tracker.nodes.append(node)
    await node.start(tracker.grpc)
    await asyncio.wait_for(node.ended.wait(), 5)
    assert node.refused is not None
    assert node.refused.remedy
    return node.refused.code


async def test_a_node_is_ready_only_after_its_shard_answered_a_probe(tracker: Running) -> None:
    node = WireNode(tracker.join_token)
    tracker.nodes.append(node)
    node.script.probe_error = "layer 3 is on fire"
    await node.start(tracker.grpc)
    await tracker.until(lambda: node.probes == 1)
    assert tracker.state(node) == "loading"
    listed = (await tracker.get("/api/nodes"))["nodes"][0]
    assert not listed["ready"]
    assert "layer 3 is on fire" in listed["problems"][0]
    assert (await tracker.chat()).status == 503
    node.script.probe_error = ""
    await tracker.wait_ready(node)
    assert node.probes == 2
    assert (await tracker.chat()).status == 200


async def test_wrong_tokens_and_protocols_are_refused_with_a_remedy(tracker: Running) -> None:
    assert await refused(tracker, WireNode("mj-wrong")) == "bad_token"
    assert await refused(tracker, WireNode("")) == "bad_token"
    old = WireNode(tracker.join_token)
    old.protocol_version = 0
    assert await refused(tracker, old) == "protocol_version"
    assert old.refused is not None
    assert "upgrade the node" in old.refused.remedy


async def test_a_credential_of_another_mesh_is_refused(start: Start, tmp_path: Path) -> None:
    one = await start(data=tmp_path / "one")
    two = await start(data=tmp_path / "two")
    node = await one.node()
    await node.leave()
    node.token = ""
    await node.join(two.grpc)
    await asyncio.wait_for(node.ended.wait(), 5)
    assert node.refused is not None
    assert node.refused.code == "wrong_mesh"


async def test_two_fingerprints_under_one_model_id_are_refused_ignoring_case(tracker: Running) -> None:
    await tracker.node(name="first")
    other = WireNode(tracker.join_token, model="TOY", fingerprint="e" * 64)
    assert await refused(tracker, other) == "fingerprint"
    assert other.refused is not None
    assert "'first'" in other.refused.remedy


async def test_layers_outside_the_model_are_refused(tracker: Running) -> None:
    assert await refused(tracker, WireNode(tracker.join_token, layers=(15, 30))) == "layers"


async def test_a_second_process_under_the_same_id_is_refused_and_the_first_lives_on(tracker: Running) -> None:
    first = await tracker.node()
    copy = WireNode(tracker.join_token, node_id=first.node_id)
    assert await refused(tracker, copy) == "duplicate_node"
    assert copy.refused is not None
    assert copy.refused.retry
    assert tracker.state(first) == "ready"


async def test_equal_names_get_a_suffix(tracker: Running) -> None:
    first = await tracker.node(name="mini")
    second = await tracker.node(name="Mini")
    assert first.welcome is not None
    assert second.welcome is not None
    assert (first.welcome.name, second.welcome.name) == ("mini", "Mini-2")


async def test_a_broken_stream_takes_the_node_out_of_routing_at_once(tracker: Running) -> None:
    node = await tracker.node()
    await node.leave()
    await tracker.until(lambda: tracker.state(node) == "lost", 1)
    assert (await tracker.chat()).status == 503


async def test_a_missed_lease_takes_the_node_out_of_routing(start: Start) -> None:
    tracker = await start(heartbeat_ms=100, lease_ms=500)
    node = await tracker.node()
    node.beating = False
    await tracker.until(lambda: tracker.state(node) == "lost", 5)
    await asyncio.wait_for(node.ended.wait(), 5)


async def test_a_node_comes_back_by_its_credential_under_its_name(tracker: Running) -> None:
    node = await tracker.node(name="mini")
    await node.leave()
    await tracker.until(lambda: tracker.state(node) == "lost")
    node.token = ""
    await node.join(tracker.grpc)
    await tracker.wait_ready(node)
    assert node.welcome is not None
    assert node.welcome.name == "mini"
    assert (await tracker.chat()).status == 200


async def test_a_flapping_node_is_set_aside_with_growing_pauses(start: Start) -> None:
    tracker = await start(flap_free=1, flap_pause_s=0.4)
    node = await tracker.node()
    pauses = []
    for _ in range(3):
        await node.leave()
        await tracker.until(lambda: tracker.state(node) == "lost")
        begun = asyncio.get_running_loop().time()
        await node.join(tracker.grpc)
        await tracker.wait_ready(node)
        pauses.append(asyncio.get_running_loop().time() - begun)
    assert pauses[1] >= 0.4
    assert pauses[2] >= 0.8
    console = (await tracker.get("/api/console"))["events"]
    assert sum(e["event"] == "node set aside" for e in console) == 2


async def test_a_wedged_engine_is_found_by_progress_and_must_prove_itself_again(start: Start) -> None:
    tracker = await start(heartbeat_ms=100, lease_ms=1000, wedge_ms=500)
    node = await tracker.node()
    node.waiting_steps, node.oldest_step_ms = 3, 60_000.0
    node.progress = 7
    await tracker.until(lambda: tracker.state(node) == "suspect", 5)
    assert (await tracker.chat()).status == 503
    probes = node.probes
    node.waiting_steps, node.oldest_step_ms = 0, 0.0
    await tracker.wait_ready(node)
    assert node.probes == probes + 1


async def test_an_engine_that_progresses_under_load_is_not_wedged(start: Start) -> None:
    tracker = await start(heartbeat_ms=50, lease_ms=1000, wedge_ms=300)
    node = await tracker.node()
    node.waiting_steps, node.oldest_step_ms = 3, 60_000.0
    for _ in range(20):
        node.progress += 1
        await asyncio.sleep(0.05)
        assert tracker.state(node) == "ready"


async def test_draining_keeps_new_calls_away_and_can_be_undone(tracker: Running) -> None:
    node = await tracker.node(name="mini")
    node.script.tokens, node.script.interval_s = 30, 0.02
    running = await tracker.chat(stream=True)
    await running.content.readany()
    url = f"{tracker.base}/api/nodes/MINI/drain"
    async with tracker.http.post(url, headers=tracker.admin()) as answer:
        assert (await answer.json())["state"] == "draining"
    assert (await tracker.chat()).status == 503
    assert (await running.text()).endswith("data: [DONE]\n\n")
    await tracker.until(lambda: any(d.HasField("drain") and d.drain.on for d in node.directives))
    async with tracker.http.delete(url, headers=tracker.admin()) as answer:
        assert (await answer.json())["state"] == "ready"
    assert (await tracker.chat()).status == 200
    async with tracker.http.post(f"{tracker.base}/api/nodes/nobody/drain", headers=tracker.admin()) as answer:
        assert answer.status == 404


async def test_cuts_are_told_before_a_node_is_entered_there(tracker: Running) -> None:
    full = await tracker.node(layers=(0, 39), model_layers=40, name="full")
    assert full.directives == []
    await tracker.node(layers=(0, 21), model_layers=40, name="head")
    await tracker.until(lambda: bool(full.directives))
    assert full.directives[0].cuts.model == "toy"
    assert list(full.directives[0].cuts.cuts) == [22]
    nodes = {"X-Meshnet-Nodes": "head,full", **tracker.admin()}
    assert (await tracker.chat(headers=nodes)).status == 409
    full.entries = (22,)
    full.report()
    await tracker.until(lambda: tracker.state(full) == "ready" and full.probes == 2)
    assert (await tracker.chat(headers=nodes)).status == 200


async def test_nodes_of_a_model_are_told_of_each_other(tracker: Running) -> None:
    head = await tracker.node(layers=(0, 14))
    tail = await tracker.node(layers=(15, 29))
    await tracker.node(model="other")
    await tracker.until(lambda: bool(head.peers_told and tail.peers_told))
    assert [(p.node_id, p.grpc_address) for p in head.peers_told[-1].peers] == [
        (tail.node_id, tail.grpc_address)
    ]
    assert [p.node_id for p in tail.peers_told[-1].peers] == [head.node_id]


async def test_a_fault_of_the_trackers_own_is_not_swallowed(
    tracker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(links: object) -> object:
        raise RuntimeError("broken for this test")

    node = await tracker.node(name="mini")
    monkeypatch.setattr("meshnet.tracker.membership.read_links", broken)
    with capture_logs() as logs:
        node.say(pb.NodeMessage(links=pb.LinkReport()))
        await asyncio.wait_for(node.ended.wait(), 15)
    (fault,) = [entry for entry in logs if entry["event"] == "membership stream failed"]
    assert fault["node_id"] == node.node_id
    assert fault["exc_info"]
    lines = [event["line"] for event in (await tracker.get("/api/console"))["events"]]
    assert "node lost mini: the tracker ran into a fault of its own; its log says more" in lines


async def test_unlike_engine_versions_never_share_a_route(tracker: Running) -> None:
    await tracker.node(layers=(0, 14), name="head")
    await tracker.node(layers=(15, 29), name="tail", engine_version="engine-2")
    answer = await tracker.chat()
    assert answer.status == 503
    listed = (await tracker.get("/api/nodes"))["nodes"]
    assert all("never share a route" in node["problems"][0] for node in listed)


async def test_a_tracker_that_is_started_again_has_its_nodes_and_settings_back(
    start: Start, tmp_path: Path
) -> None:
    first = await start(data=tmp_path / "kept")
    node = await first.node(name="mini")
    url = "/api/settings/routing"
    change = {"default": {"cost_model": "weighted", "weights": {"hop": 0.5}}}
    async with first.http.put(first.base + url, json=change, headers=first.admin()) as answer:
        assert answer.status == 200
    await first.server.stop()
    await asyncio.wait_for(node.ended.wait(), 5)
    second = await start(data=tmp_path / "kept", secrets=first)
    node.token = ""
    await node.join(second.grpc)
    await second.wait_ready(node)
    second.nodes.append(first.nodes.pop())
    assert (await second.chat()).status == 200
    assert (await second.get(url))["default"]["weights"]["hop"] == 0.5


async def test_what_a_node_holds_stays_bounded_and_readable(tracker: Running) -> None:
    """Names and ids end up in headers, consoles and lists."""
    node = await tracker.node(name="evil\r\nname, with comma" + "x" * 500)
    assert node.welcome is not None
    assert "\n" not in node.welcome.name
    assert "," not in node.welcome.name
    assert len(node.welcome.name) <= 64


@pytest.mark.parametrize("url", ["ftp://a:1", "http://", "http://a:port", "http://a:99999", "http://[::1"])
def test_an_address_that_cannot_be_dialled_is_refused(url: str) -> None:
    join = pb.JoinRequest(node_id="n", http_url=url, grpc_address="a:1")
    with pytest.raises(WireError, match="http_url"):
        read_join(join, 1, 0)
