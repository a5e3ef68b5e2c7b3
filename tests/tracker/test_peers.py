"""Two trackers on one database are one mesh."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tracker.conftest import Running, Start

COUNT = 60


async def pair(start: Start, folder: Path) -> tuple[Running, Running]:
    one = await start(data=folder / "shared")
    two = await start(data=folder / "shared", secrets=one)
    return one, two


async def sees(tracker: Running, name: str, state: str = "ready") -> None:
    def seen() -> bool:
        assert tracker.server.tracker is not None
        roster = tracker.server.tracker.roster
        node = roster.find(name)
        return node is not None and node.status(roster.clock()) == state

    await tracker.until(seen, 20)


async def test_a_node_of_one_tracker_serves_calls_of_the_other(start: Start, tmp_path: Path) -> None:
    one, two = await pair(start, tmp_path)
    head = await one.node(name="head", layers=(0, 14))
    await two.node(name="tail", layers=(15, 29))
    for tracker in (one, two):
        await sees(tracker, "head")
        await sees(tracker, "tail")
        answer = await tracker.chat()
        assert answer.headers["x-meshnet-route"] == "head[0-14]>tail[15-29]"
        assert (await answer.json())["choices"][0]["message"]["content"].startswith(" t0 t1")
    assert len(head.seen) == 2
    info = await one.get("/api/join-info")
    assert set(info["trackers"]) == {one.base, two.base}


async def test_calls_are_known_at_both_and_can_be_cancelled_at_either(start: Start, tmp_path: Path) -> None:
    one, two = await pair(start, tmp_path)
    node = await one.node(name="node")
    node.script.tokens, node.script.interval_s = 100_000, 0.02
    await sees(two, "node")
    answer = await one.chat(stream=True)
    await answer.content.readany()
    call_id = answer.headers["x-meshnet-call"]
    async with asyncio.timeout(10):
        while call_id not in [call["id"] for call in (await two.get("/api/calls"))["calls"]]:
            await asyncio.sleep(0.1)
    shown = await two.get(f"/api/calls/{call_id}")
    assert shown["timeline"]
    assert shown["tracker"] == one.base
    assert (await one.get(f"/api/calls/{call_id}"))["tracker"] is None
    async with two.http.delete(f"{two.base}/api/calls/{call_id}", headers=two.use()) as cancelled:
        assert await cancelled.json() == {"id": call_id, "phase": "cancelled"}
    await asyncio.wait_for(node.seen[0].closed.wait(), 5)
    await answer.read()


async def test_nodes_are_told_of_trackers_that_come_and_go(start: Start, tmp_path: Path) -> None:
    one = await start(data=tmp_path / "shared")
    node = await one.node()
    await one.until(lambda: node.trackers == [one.base], 10)
    two = await start(data=tmp_path / "shared", secrets=one)
    await one.until(lambda: node.trackers == [one.base, two.base], 10)
    await two.server.stop()
    await one.until(lambda: node.trackers == [one.base], 15)


async def test_one_tracker_is_killed_and_new_calls_through_the_other_do_not_notice(
    start: Start, tmp_path: Path
) -> None:
    one, two = await pair(start, tmp_path)
    node = await one.node(name="node")
    await sees(two, "node")
    await one.server.stop()
    await asyncio.wait_for(node.ended.wait(), 10)
    assert (await two.chat()).status == 200
    node.token = ""
    await node.join(two.grpc)
    await two.wait_ready(node)
    two.nodes.append(one.nodes.pop())
    assert (await two.chat()).status == 200
    await asyncio.sleep(2.5)
    assert two.state(node) == "ready"
    assert (await two.chat()).status == 200


async def test_a_drain_holds_at_every_tracker_and_across_restarts(start: Start, tmp_path: Path) -> None:
    one, two = await pair(start, tmp_path)
    node = await one.node(name="node")
    await sees(two, "node")
    url = f"{two.base}/api/nodes/node/drain"
    async with two.http.post(url, headers=two.admin()) as answer:
        assert answer.status == 200
    await one.until(lambda: any(d.HasField("drain") and d.drain.on for d in node.directives), 10)
    assert one.state(node) == "draining"
    await one.server.stop()
    await node.join(two.grpc)
    await sees(two, "node", "draining")
    async with two.http.delete(url, headers=two.admin()) as answer:
        assert answer.status == 200
    await two.wait_ready(node)


async def test_keys_are_known_at_both_and_revoked_at_both(start: Start, tmp_path: Path) -> None:
    one, two = await pair(start, tmp_path)
    keys = (await one.get("/api/keys"))["keys"]
    use_key = next(key["id"] for key in keys if key["scope"] == "use")
    async with two.http.get(f"{two.base}/v1/models", headers=two.use()) as answer:
        assert answer.status == 200
    async with one.http.delete(f"{one.base}/api/keys/{use_key}", headers=one.admin()) as answer:
        assert answer.status == 200
    async with asyncio.timeout(10):
        while True:
            async with two.http.get(f"{two.base}/v1/models", headers=two.use()) as answer:
                if answer.status == 401:
                    return
            await asyncio.sleep(0.1)
