"""Calls through the front door, on real sockets, with nodes that speak the real wire."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from tracker.conftest import Running, Start, events_of

from meshnet.protocol.calls import CallError

TEXT = "".join(f" t{k}" for k in range(8))


async def test_a_streamed_call_over_two_nodes(tracker: Running) -> None:
    head = await tracker.node(layers=(0, 14), name="head")
    tail = await tracker.node(layers=(15, 29), name="tail")
    answer = await tracker.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    assert answer.headers["x-meshnet-route"] == "head[0-14]>tail[15-29]"
    assert answer.headers["x-request-id"]
    body = await answer.text()
    assert body.endswith("data: [DONE]\n\n")
    *chunks, last = events_of(body)
    assert last == "[DONE]"
    decoded = [json.loads(chunk) for chunk in chunks]
    assert decoded[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in decoded if c["choices"]) == TEXT
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


async def test_a_call_without_a_stream_is_put_together_from_the_same_events(tracker: Running) -> None:
    await tracker.node()
    answer = await tracker.chat(headers={"X-Request-Id": "mine-1"}, n=2)
    assert answer.status == 200
    assert answer.headers["x-request-id"] == "mine-1"
    body = await answer.json()
    assert [choice["message"]["content"] for choice in body["choices"]] == [TEXT, TEXT]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    console = (await tracker.get("/api/console"))["events"]
    mine = [e["event"] for e in console if e.get("call_id") == answer.headers["x-meshnet-call"]]
    assert mine == ["proxy route selected", "proxy connected", "proxy progress", "proxy complete"]


async def test_text_completions(tracker: Running) -> None:
    await tracker.node()
    async with tracker.http.post(
        f"{tracker.base}/v1/completions", json={"model": "TOY", "prompt": "Once"}, headers=tracker.use()
    ) as answer:
        body = await answer.json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == TEXT


async def test_models_are_listed_as_openai_does(tracker: Running) -> None:
    await tracker.node()
    listed = await tracker.get("/v1/models", admin=False)
    assert [model["id"] for model in listed["data"]] == ["toy"]
    assert (await tracker.get("/v1/models/Toy", admin=False))["object"] == "model"
    async with tracker.http.get(f"{tracker.base}/v1/models/other", headers=tracker.use()) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "model_not_found"


# ------------------------------------------------------------------ forced routes


async def test_a_forced_route_starts_each_stage_one_layer_later(tracker: Running) -> None:
    head = await tracker.node(layers=(0, 21), model_layers=40, name="head")
    full = await tracker.node(layers=(0, 39), model_layers=40, name="full", entries=(22,))
    alone = await tracker.chat()
    assert alone.headers["x-meshnet-route"] == "full[0-39]"
    nodes = {"X-Meshnet-Nodes": "head, full", **tracker.admin()}
    answer = await tracker.chat(headers=nodes)
    assert answer.status == 200, await answer.text()
    assert answer.headers["x-meshnet-route"] == "head[0-21]>full[22-39]"
    stages = head.seen[0].ticket.stages
    assert stages[1].start_layer == 22
    assert stages[1].grpc_address == full.grpc_address
    console = (await tracker.get("/api/console"))["events"]
    selected = [e for e in console if e["event"] == "proxy route selected"][-1]
    assert "downstream start_layer=22" in selected["line"]
    assert selected["downstream"] == [{"endpoint": full.grpc_address, "start_layer": 22}]
    assert (await answer.json())["choices"][0]["message"]["content"] == TEXT


async def test_a_forced_route_with_a_gap_is_refused_naming_it(tracker: Running) -> None:
    await tracker.node(layers=(0, 21), model_layers=40, name="head")
    await tracker.node(layers=(0, 39), model_layers=40, name="full")
    for nodes, wanted in (
        ("head", "layers 22-39"),
        ("full,head", "nothing to run"),
        ("head,full", "cannot be entered at layer 22"),
        ("head,nobody", "no node 'nobody'"),
    ):
        answer = await tracker.chat(headers={"X-Meshnet-Nodes": nodes, **tracker.admin()})
        assert answer.status == 409, nodes
        assert wanted in (await answer.json())["error"]["message"]


async def test_only_an_admin_key_may_force_a_route(tracker: Running) -> None:
    await tracker.node()
    answer = await tracker.chat(headers={"X-Meshnet-Nodes": "anyone"})
    assert answer.status == 403
    assert (await answer.json())["error"]["code"] == "admin_only"


# ------------------------------------------------------------------ clients that leave, and slow ones


async def test_a_client_that_goes_away_stops_the_head_within_a_second(tracker: Running) -> None:
    node = await tracker.node(slots=1)
    node.script.tokens, node.script.interval_s = 100_000, 0.02
    answer = await tracker.chat(stream=True)
    await answer.content.readany()
    seen = node.seen[0]
    answer.close()
    async with asyncio.timeout(3):
        await seen.closed.wait()
    await tracker.until(lambda: not running(tracker))
    call = await tracker.get(f"/api/calls/{answer.headers['x-meshnet-call']}")
    assert call["phase"] == "cancelled"
    assert call["error"]["code"] == "client_gone"
    node.script.tokens = 3
    assert (await tracker.chat()).status == 200


async def test_a_client_may_leave_during_prefill_and_in_the_queue(tracker: Running) -> None:
    node = await tracker.node(slots=1)
    node.script.first_s = 100
    first = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: len(node.open_calls) == 1)
    second = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: waiting(tracker) == 1)
    second.cancel()
    await tracker.until(lambda: waiting(tracker) == 0, 3)
    first.cancel()
    await tracker.until(lambda: not node.open_calls, 3)
    await tracker.until(lambda: not running(tracker))
    assert held(tracker) == {}


async def test_a_call_is_cancelled_through_the_api(tracker: Running) -> None:
    node = await tracker.node()
    node.script.tokens, node.script.interval_s = 100_000, 0.02
    answer = await tracker.chat(stream=True)
    await answer.content.readany()
    call_id = answer.headers["x-meshnet-call"]
    async with tracker.http.delete(f"{tracker.base}/api/calls/{call_id}", headers=tracker.use()) as cancelled:
        assert await cancelled.json() == {"id": call_id, "phase": "cancelled"}
    rest = events_of(await answer.text())
    assert json.loads(rest[-2])["error"]["code"] == "cancelled"
    assert rest[-1] == "[DONE]"
    await asyncio.wait_for(node.seen[0].closed.wait(), 3)


async def test_a_slow_reader_holds_the_head_back_and_nobody_else(tracker: Running) -> None:
    node = await tracker.node()
    node.script.tokens, node.script.pad = 1_000_000, 50_000
    host, port = tracker.base.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2000}
    )
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tracker.use_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, (host, int(port)))
    await loop.sock_sendall(slow, request.encode())
    await tracker.until(lambda: len(node.seen) == 1)
    computed = -1
    while node.seen[0].computed != computed:
        computed = node.seen[0].computed
        await asyncio.sleep(0.5)
    assert computed < 2000
    node.script.pad = 0
    assert (await tracker.chat(max_tokens=50)).status == 200
    slow.close()
    await asyncio.wait_for(node.seen[0].closed.wait(), 3)


async def test_a_stalled_reader_is_cut_off_and_its_slot_freed(start: Start) -> None:
    tracker = await start(stalled_reader_s=0.5)
    node = await tracker.node(slots=1)
    node.script.tokens, node.script.pad = 1_000_000, 50_000
    host, port = tracker.base.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2000}
    )
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tracker.use_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, (host, int(port)))
    await loop.sock_sendall(slow, request.encode())
    await tracker.until(lambda: len(node.seen) == 1)
    await asyncio.wait_for(node.seen[0].closed.wait(), 5)
    calls = (await tracker.get("/api/calls"))["calls"]
    assert calls[0]["phase"] == "cancelled"
    assert calls[0]["error"]["code"] == "stalled_reader"
    assert held(tracker) == {}
    slow.close()


async def test_keep_alive_comments_while_queued_and_in_prefill(start: Start) -> None:
    tracker = await start(keepalive_s=0.2)
    node = await tracker.node(slots=1)
    node.script.prefill_steps, node.script.prefill_step_s, node.script.prompt_tokens = 4, 0.3, 4
    first = await tracker.chat(stream=True)
    second = await tracker.chat(stream=True)
    one, two = await asyncio.gather(first.text(), second.text())
    assert ": prefill 1/4" in one
    assert ": queued position 1" in two
    assert one.endswith("data: [DONE]\n\n")
    assert two.endswith("data: [DONE]\n\n")


async def test_a_prefill_that_moves_on_is_kept_alive_as_well(start: Start) -> None:
    tracker = await start(keepalive_s=0.3)
    node = await tracker.node()
    node.script.prefill_steps, node.script.prefill_step_s, node.script.prompt_tokens = 20, 0.05, 20
    text = await (await tracker.chat(stream=True)).text()
    comments = [line for line in text.splitlines() if line.startswith(": prefill ")]
    assert 2 <= len(comments) < 20
    assert all(comment.endswith("/20") for comment in comments)


# ------------------------------------------------------------------ refusals


async def test_a_full_queue_answers_429_and_no_room_503_with_retry_after(start: Start) -> None:
    tracker = await start(queue_length=2, queue_wait_s=0.5)
    node = await tracker.node(slots=1)
    node.script.first_s = 30
    busy = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: len(node.open_calls) == 1)
    waiters = [asyncio.create_task(tracker.chat()) for _ in range(2)]
    await tracker.until(lambda: waiting(tracker) == 2)
    refused = await tracker.chat()
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert (await refused.json())["error"]["code"] == "queue_full"
    for answer in await asyncio.gather(*waiters):
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await answer.json())["error"]["code"] == "queue_timeout"
    busy.cancel()


async def test_three_hundred_calls_at_once_all_end(tracker: Running) -> None:
    for name in ("one", "two"):
        node = await tracker.node(name=name, slots=4)
        node.script.interval_s = 0.002
    answers = await asyncio.gather(*(tracker.chat(n=1 + k % 2) for k in range(300)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 200
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status == 429)
    assert held(tracker) == {}
    assert waiting(tracker) == 0
    assert running(tracker) == 0


async def test_a_light_key_is_not_starved_by_one_with_many_long_calls(tracker: Running) -> None:
    node = await tracker.node(slots=1)
    node.script.tokens, node.script.interval_s = 20, 0.01
    heavy = [asyncio.create_task(tracker.chat(max_tokens=1000)) for _ in range(20)]
    await tracker.until(lambda: waiting(tracker) >= 10)
    light = await tracker.chat(headers=tracker.admin(), max_tokens=5)
    assert light.status == 200
    assert sum(task.done() for task in heavy) < 15
    await asyncio.gather(*heavy)


async def test_a_call_that_asks_for_more_than_the_mesh_has_is_refused_at_once(tracker: Running) -> None:
    await tracker.node(slots=2)
    answer = await tracker.chat(n=3)
    assert answer.status == 400
    assert (await answer.json())["error"]["code"] == "too_large"
    assert (await tracker.chat(n=2)).status == 200


async def test_a_longest_call_is_ended(start: Start) -> None:
    tracker = await start(call_limit_s=0.5)
    node = await tracker.node()
    node.script.tokens, node.script.interval_s = 100_000, 0.02
    answer = await tracker.chat(stream=True)
    rest = events_of(await answer.text())
    assert json.loads(rest[-2])["error"]["code"] == "call_limit"
    await asyncio.wait_for(node.seen[0].closed.wait(), 3)


async def test_the_heads_own_refusal_reaches_the_client_before_and_after_the_first_byte(
    tracker: Running,
) -> None:
    node = await tracker.node()
    node.script.error = CallError(400, "context_length_exceeded", "too long", "messages")
    answer = await tracker.chat(stream=True)
    assert answer.status == 400
    error = (await answer.json())["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "toy"}, 400, "messages"),
        ({"model": "nothing", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        ({"model": "toy", "messages": [{"role": "user", "content": "x"}], "n": True}, 400, "n"),
        ({"model": "toy", "messages": [{"role": "user", "content": "x"}], "banana": 1}, 400, "banana"),
        (
            {
                "model": "toy",
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            400,
            "tools",
        ),
    ],
)
async def test_bad_requests_name_the_parameter(
    tracker: Running, body: dict[str, object], status: int, param: str
) -> None:
    await tracker.node()
    async with tracker.http.post(
        f"{tracker.base}/v1/chat/completions", json=body, headers=tracker.use()
    ) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["param"] == param


async def test_a_request_needs_a_key(tracker: Running) -> None:
    url = f"{tracker.base}/v1/chat/completions"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}):
        async with tracker.http.post(url, json={}, headers=headers) as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == "invalid_api_key"


async def test_too_many_wrong_keys_make_the_address_wait(start: Start) -> None:
    tracker = await start(failed_keys_per_minute=3)
    url = f"{tracker.base}/v1/models"
    for _ in range(3):
        async with tracker.http.get(url, headers={"Authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401
    async with tracker.http.get(url, headers=tracker.use()) as answer:
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1


async def test_bodies_that_are_too_large_or_no_json_are_refused(start: Start) -> None:
    tracker = await start(max_body_bytes=10_000)
    url = f"{tracker.base}/v1/chat/completions"
    async with tracker.http.post(url, data=b"x" * 20_000, headers=tracker.use() | JSON) as answer:
        assert answer.status == 413
    async with tracker.http.post(url, data=pieces(20), headers=tracker.use() | JSON) as answer:
        assert answer.status == 413
    async with tracker.http.post(
        url, data=b"<a/>", headers=tracker.use() | {"content-type": "text/xml"}
    ) as answer:
        assert answer.status == 415
    async with tracker.http.post(url, data=b"{", headers=tracker.use() | JSON) as answer:
        assert answer.status == 400


async def test_what_is_not_there_or_takes_another_method(tracker: Running) -> None:
    async with tracker.http.get(f"{tracker.base}/v1/nothing", headers=tracker.use()) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "not_found"
    for path in ("/v1/chat/completions", "/api/route/preview"):
        async with tracker.http.get(tracker.base + path, headers=tracker.admin()) as answer:
            assert answer.status == 405
            assert "POST" in answer.headers["allow"]
            assert (await answer.json())["error"]["code"] == "method_not_allowed"


async def test_slow_headers_and_slow_bodies_are_cut_off(start: Start) -> None:
    tracker = await start(header_timeout_s=0.3, body_timeout_s=0.3)
    host, port = tracker.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
    begun = time.monotonic()
    assert b"408" in await asyncio.wait_for(reader.readline(), 5)
    assert time.monotonic() - begun < 3
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\nauthorization: Bearer " + tracker.use_key.encode() + b"\r\n\r\n{"
    )
    assert b"408" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
    assert b"431" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    for size, status in ((60_000, b"200"), (70_000, b"431")):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * size + b"\r\n\r\n")
        assert status in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_a_connection_is_kept_between_requests(tracker: Running) -> None:
    await tracker.node()
    host, port = tracker.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model": "toy", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
    for _ in range(3):
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
            % (tracker.use_key.encode(), len(body), body)
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" not in head
        assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)).endswith(
            b"[DONE]\n\n\r\n0\r\n\r\n"
        )
    writer.close()


JSON = {"content-type": "application/json"}


async def pieces(count: int):  # type: ignore[no-untyped-def]
    for _ in range(count):
        yield b"x" * 1_000


def running(tracker: Running) -> int:
    assert tracker.server.tracker is not None
    return tracker.server.tracker.orchestrator.running


def waiting(tracker: Running) -> int:
    assert tracker.server.tracker is not None
    return tracker.server.tracker.orchestrator.placement.waiting


def held(tracker: Running) -> dict[str, object]:
    assert tracker.server.tracker is not None
    return dict(tracker.server.tracker.orchestrator.placement.state.holds)
