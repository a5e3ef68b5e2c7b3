"""Statistics, trust and the billing guard on a live tracker: broken routes neither win nor earn."""

from __future__ import annotations

import asyncio
from typing import Any

from tracker.conftest import Running, Start
from tracker.wire_node import WireNode

from meshnet.protocol.calls import WeighedToken

PRICE = {"model": "*", "input": 1_000_000, "output": 2_000_000}


async def priced(tracker: Running) -> None:
    async with tracker.http.post(f"{tracker.base}/api/prices", json=PRICE, headers=tracker.admin()) as answer:
        assert answer.status == 201, await answer.text()


async def ledger(tracker: Running, call_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = await tracker.get(f"/api/calls/{call_id}/ledger")
    return shown


async def closed(tracker: Running, call_id: str) -> dict[str, Any]:
    """The case of a call, once it is closed."""
    for _ in range(400):
        for case in (await tracker.get("/api/suspects"))["suspects"]:
            if case["call_id"] == call_id and case["closed_at"] is not None:
                return dict(case)
        await asyncio.sleep(0.02)
    raise AssertionError("the case stays open")


async def broken_pipeline(tracker: Running) -> tuple[WireNode, WireNode]:
    """Two nodes whose route ends by itself after one token."""
    head = await tracker.node(name="head", layers=(0, 14))
    tail = await tracker.node(name="tail", layers=(15, 29))
    head.script.tokens, head.script.by, head.script.reason = 1, "eos", "stop"
    head.script.end_token = 2
    return head, tail


async def test_a_call_is_charged_by_what_was_measured(tracker: Running) -> None:
    await priced(tracker)
    head = await tracker.node(name="head", layers=(0, 14))
    tail = await tracker.node(name="tail", layers=(15, 29))
    answer = await tracker.chat()
    booked = await ledger(tracker, answer.headers["x-meshnet-call"])
    assert booked["status"] == "settled"
    assert booked["charge"] == 5 * 1 + 8 * 2
    assert {work["node_id"] for work in booked["work"]} == {head.node_id, tail.node_id}
    check = await tracker.get("/api/ledger/check")
    assert check["ok"], check


async def test_a_small_balance_is_enough_for_what_the_prompt_really_comes_to(tracker: Running) -> None:
    """The first reservation takes a token for each byte; where that is too much, the head counts."""
    await priced(tracker)
    node = await tracker.node()
    node.script.prompt_tokens = 5
    url = f"{tracker.base}/api/accounts"
    async with tracker.http.post(url, json={"name": "small"}, headers=tracker.admin()) as answer:
        assert answer.status == 201
    async with tracker.http.post(
        f"{url}/small/deposits", json={"amount": 30}, headers=tracker.admin()
    ) as answer:
        assert answer.status == 200, await answer.text()
    async with tracker.http.post(
        f"{tracker.base}/api/keys", json={"account": "small", "name": "k"}, headers=tracker.admin()
    ) as answer:
        secret = (await answer.json())["secret"]
    key = {"Authorization": f"Bearer {secret}"}
    accepted = await tracker.chat(headers=key, max_tokens=10)
    assert accepted.status == 200, await accepted.text()
    refused = await tracker.chat(headers=key, max_tokens=10)
    assert refused.status == 429
    assert (await refused.json())["error"]["code"] == "insufficient_quota"


async def test_a_node_that_stands_still_does_not_hold_up_the_counting_of_a_prompt(start: Start) -> None:
    """Heads are asked where a balance might be too small for the prompt; this one has just enough."""
    tracker = await start(first_event_s=0.5)
    await priced(tracker)
    admin = tracker.admin()
    for path, body in (
        ("accounts", {"name": "small"}),
        ("accounts/small/deposits", {"amount": 50}),
        ("keys", {"account": "small", "name": "small"}),
    ):
        async with tracker.http.post(f"{tracker.base}/api/{path}", json=body, headers=admin) as answer:
            made = await answer.json()
    small = {"Authorization": f"Bearer {made['secret']}"}
    nodes = [await tracker.node(name=name) for name in ("one", "two")]
    for frozen in nodes:
        frozen.script.tokenize_s = 60.0
        assert (await tracker.chat(headers=small, max_tokens=8)).status == 200
        frozen.script.tokenize_s = 0.0
    assert (await tracker.chat(headers=small, max_tokens=8)).status == 429


async def test_failed_calls_cost_nothing_and_cancelled_ones_what_was_produced(tracker: Running) -> None:
    await priced(tracker)
    node = await tracker.node()
    node.script.tokens, node.script.interval_s = 1000, 0.02
    answer = await tracker.chat(stream=True)
    await answer.content.readany()
    await tracker.until(lambda: node.seen[0].computed >= 5)
    call_id = answer.headers["x-meshnet-call"]
    async with tracker.http.delete(f"{tracker.base}/api/calls/{call_id}", headers=tracker.use()):
        pass
    await answer.text()
    cancelled = await ledger(tracker, call_id)
    assert cancelled["status"] == "settled"
    assert cancelled["charge"] >= 5 + 2 * 5
    answer = await tracker.chat(stream=True)
    await answer.content.readany()
    tracker.nodes.remove(node)
    await node.vanish()
    await answer.text()
    failed = await ledger(tracker, answer.headers["x-meshnet-call"])
    assert (failed["status"], failed["charge"]) == ("released", 0)
    assert (await tracker.get("/api/ledger/check"))["ok"]


async def test_a_suspect_call_that_a_single_node_confirms_is_charged_once(tracker: Running) -> None:
    await priced(tracker)
    await broken_pipeline(tracker)
    whole = await tracker.node(name="whole", decode_ms=50.0)
    answer = await tracker.chat()
    call_id = answer.headers["x-meshnet-call"]
    case = await closed(tracker, call_id)
    assert (case["cause"], case["state"]) == ("suspect", "confirmed")
    assert whole.seen[0].call.check == (100, 2)
    assert whole.seen[0].call.seed is not None
    booked = await ledger(tracker, call_id)
    assert (booked["status"], booked["charge"]) == ("settled", 5 + 2)


async def test_a_suspect_call_that_is_not_confirmed_is_released_and_its_nodes_lose_trust(
    tracker: Running,
) -> None:
    await priced(tracker)
    await broken_pipeline(tracker)
    whole = await tracker.node(name="whole", decode_ms=50.0)
    whole.script.weighs = lambda token: WeighedToken(token, -9.0, -0.1, token + 1, True)
    first = await tracker.chat()
    assert first.headers["x-meshnet-route"] == "head[0-14]>tail[15-29]"
    case = await closed(tracker, first.headers["x-meshnet-call"])
    assert case["state"] == "refuted"
    booked = await ledger(tracker, first.headers["x-meshnet-call"])
    assert (booked["status"], booked["charge"]) == ("released", 0)
    nodes = {node["name"]: node for node in (await tracker.get("/api/nodes"))["nodes"]}
    assert nodes["head"]["trust"] < 0.5
    assert nodes["tail"]["trust"] < 0.5
    assert nodes["whole"]["trust"] == 1.0
    second = await tracker.chat()
    assert second.headers["x-meshnet-route"] == "whole[0-29]"
    assert (await tracker.get("/api/ledger/check"))["ok"]


async def test_a_suspect_call_without_another_route_is_released_uncharged(tracker: Running) -> None:
    await priced(tracker)
    await broken_pipeline(tracker)
    answer = await tracker.chat()
    case = await closed(tracker, answer.headers["x-meshnet-call"])
    assert case["state"] == "unchecked"
    booked = await ledger(tracker, answer.headers["x-meshnet-call"])
    assert (booked["status"], booked["charge"]) == ("released", 0)


async def test_a_node_that_cannot_weigh_leaves_the_call_unchecked(start: Start) -> None:
    tracker = await start()
    await priced(tracker)
    await broken_pipeline(tracker)
    whole = await tracker.node(name="whole", decode_ms=50.0)
    whole.script.refuse_status = 500
    answer = await tracker.chat()
    case = await closed(tracker, answer.headers["x-meshnet-call"])
    assert case["state"] == "unchecked"
    assert "interrupted" in case["reason"]


async def test_a_broken_pipeline_with_an_absurd_speed_does_not_win_the_next_route(tracker: Running) -> None:
    """One token in no time at all: the sample is kept, marked, and moves nothing."""
    head, _ = await broken_pipeline(tracker)
    await tracker.chat()
    figures = await tracker.get("/api/statistics")
    node = next(v for v in figures["nodes"] if v["node_id"] == head.node_id)
    assert node["samples"] == 0
    assert node["excluded"] == {"suspect": 1}
    assert node["decode_ms_per_layer"] is None
    assert figures["routes"][0]["excluded"] == {"suspect": 1}


async def test_what_calls_show_moves_what_routing_believes(tracker: Running) -> None:
    slow = await tracker.node(name="claims-fast", decode_ms=0.1)
    honest = await tracker.node(name="honest", decode_ms=1.0)
    for node in (slow, honest):
        node.script.tokens = 10
    slow.script.compute_ms = 5_000.0
    for _ in range(3):
        assert (await tracker.chat()).headers["x-meshnet-route"] == "claims-fast[0-29]"
    # Nodes beat once a second, and figures are kept for as long.
    await asyncio.sleep(1.2)
    assert (await tracker.chat()).headers["x-meshnet-route"] == "honest[0-29]"


async def test_reservations_of_a_tracker_that_was_killed_are_released(start: Start) -> None:
    tracker = await start()
    await priced(tracker)
    node = await tracker.node()
    node.script.tokens, node.script.interval_s = 100_000, 0.05
    answer = await tracker.chat(stream=True)
    await answer.content.readany()
    call_id = answer.headers["x-meshnet-call"]
    assert (await ledger(tracker, call_id))["status"] == "open"
    assert tracker.server.tracker is not None
    books = tracker.server.tracker.books
    # As if killed: another tracker of the mesh finds that this one has ended.
    await books.trackers.end()
    answer.close()
    await tracker.server.stop()
    again = await start(secrets=tracker)
    for _ in range(200):
        if (await ledger(again, call_id))["status"] != "open":
            break
        await asyncio.sleep(0.05)
    assert (await ledger(again, call_id))["status"] in ("released", "settled")
    assert (await again.get("/api/ledger/check"))["ok"]
