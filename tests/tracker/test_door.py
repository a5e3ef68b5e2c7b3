"""Calls through the front door, on real sockets, with nodes that speak the real wire."""

from __future__ import annotations

import json

from tracker.conftest import Running, events_of


async def test_a_streamed_call_over_two_nodes(tracker: Running) -> None:
    head = await tracker.node(layers=(0, 14), name="head")
    tail = await tracker.node(layers=(15, 29), name="tail")
    answer = await tracker.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-meshnet-route"] == "head[0-14]>tail[15-29]"
    assert answer.headers["x-request-id"]
    body = await answer.text()
    assert body.endswith("data: [DONE]\n\n")
    *chunks, last = events_of(body)
    assert last == "[DONE]"
    decoded = [json.loads(chunk) for chunk in chunks]
    assert decoded[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in decoded if c["choices"])
    assert text == "".join(f" t{k}" for k in range(8))
    assert decoded[-1]["choices"] == []
    assert decoded[-1]["usage"]["completion_tokens"] == 8
    stages = head.seen[0].ticket.stages
    assert [(s.node_id, s.start_layer, s.end_layer) for s in stages] == [
        (head.node_id, 0, 14),
        (tail.node_id, 15, 29),
    ]
    call = await tracker.get(f"/api/calls/{answer.headers['x-meshnet-call']}")
    assert call["phase"] == "complete"
    assert call["output_tokens"] == 8
    assert [moment["event"] for moment in call["timeline"]] == [
        "accepted",
        "route_selected",
        "connected",
        "first_token",
        "complete",
    ]
