"""Live calls, the event stream and the console, as the dashboard sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.metrics import documented, shown
from tracker.conftest import Running, Start

from meshnet.tracker.console import Console
from meshnet.tracker.feed import ADMINS, EVERYONE, Audience, Feed
from meshnet.tracker.tracing import Tracing


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, str, Any]]:
    """(id, event, data) of an open event stream."""
    fields: dict[str, str] = {}
    while line := (await answer.content.readline()).decode():
        line = line.rstrip("\n")
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


async def watch(tracker: Running, *, admin: bool = True, last: int | None = None) -> aiohttp.ClientResponse:
    headers = tracker.admin() if admin else tracker.use()
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    answer = await tracker.http.get(f"{tracker.base}/api/events", headers=headers)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer


async def test_a_call_is_seen_from_acceptance_to_its_end(tracker: Running) -> None:
    node = await tracker.node(name="mini")
    node.script.tokens, node.script.interval_s = 100, 0.02
    stream = await watch(tracker)
    seen = events(stream)
    number, kind, snapshot = await anext(seen)
    assert kind == "snapshot"
    assert snapshot["calls"] == []
    assert [n["name"] for n in snapshot["nodes"]] == ["mini"]
    assert [m["id"] for m in snapshot["models"]] == ["toy"]
    assert snapshot["models"][0]["complete"]
    assert snapshot["seq"] == number
    call = asyncio.create_task(tracker.chat())
    upserts: list[dict[str, Any]] = []
    numbers = [number]
    async for number, kind, value in seen:
        numbers.append(number)
        assert kind == "upsert"
        if value["kind"] == "call":
            upserts.append(value["value"])
            if value["value"]["phase"] == "complete":
                break
    assert (await call).status == 200
    assert numbers == sorted(set(numbers))
    phases = [value["phase"] for value in upserts]
    assert phases[0] == "accepted"
    assert "generating" in phases
    tokens = [value["output_tokens"] for value in upserts]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) >= 4
    assert upserts[-1]["output_tokens"] == 100
    assert upserts[-1]["stages"][0]["name"] == "mini"
    assert upserts[-1]["stages"][0]["compute_ms"] == 5.0
    # Two seconds at four a second, and some for the phases.
    assert len(upserts) <= 20
    stream.close()


async def test_in_flight_calls_come_first_and_ended_ones_are_bounded(start: Start) -> None:
    tracker = await start(ended_calls=3)
    node = await tracker.node(slots=4)
    for _ in range(5):
        await tracker.chat()
    node.script.first_s = 30
    hanging = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: len(node.open_calls) == 1)
    calls = (await tracker.get("/api/calls"))["calls"]
    assert [call["phase"] for call in calls] == ["connected", "complete", "complete", "complete"]
    assert calls[0]["elapsed_ms"] > 0
    hanging.cancel()


async def test_prompts_and_answers_are_in_none_of_it(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = await start()
    await tracker.node()
    stream = await watch(tracker)
    answer = await tracker.chat(messages=[{"role": "user", "content": "the secret word is xylophone"}])
    call_id = answer.headers["x-meshnet-call"]
    shown = json.dumps(
        [
            await tracker.get(f"/api/calls/{call_id}"),
            await tracker.get("/api/calls"),
            await tracker.get("/api/console"),
        ]
    )
    raw = b""
    while b'"phase":"complete"' not in raw:
        raw += await stream.content.readany()
    for text in (shown, raw.decode(), *capsys.readouterr()):
        assert "xylophone" not in text
        assert " t3" not in text
        assert tracker.use_key not in text
    stream.close()


async def test_a_use_key_sees_its_own_calls_and_no_nodes(tracker: Running) -> None:
    await tracker.node()
    mine = await tracker.chat()
    theirs = await tracker.chat(headers=tracker.admin())
    calls = (await tracker.get("/api/calls", admin=False))["calls"]
    assert [call["id"] for call in calls] == [mine.headers["x-meshnet-call"]]
    hidden = theirs.headers["x-meshnet-call"]
    async with tracker.http.get(f"{tracker.base}/api/calls/{hidden}", headers=tracker.use()) as answer:
        assert answer.status == 404
    async with tracker.http.delete(f"{tracker.base}/api/calls/{hidden}", headers=tracker.use()) as answer:
        assert answer.status == 404
    async with tracker.http.get(f"{tracker.base}/api/nodes", headers=tracker.use()) as answer:
        assert answer.status == 403
    stream = await watch(tracker, admin=False)
    _, _, snapshot = await anext(events(stream))
    assert snapshot["nodes"] == []
    assert [call["id"] for call in snapshot["calls"]] == [mine.headers["x-meshnet-call"]]
    assert {entry["call_id"] for entry in snapshot["console"]} == {mine.headers["x-meshnet-call"]}
    stream.close()


async def test_last_event_id_resumes_where_the_ring_still_reaches(tracker: Running) -> None:
    await tracker.node()
    steady = await watch(tracker)
    stream = await watch(tracker)
    seen = events(stream)
    number, _, _ = await anext(seen)
    stream.close()
    answer = await tracker.chat()
    again = await watch(tracker, last=number)
    resumed, kind, value = await anext(events(again))
    assert resumed == number + 1
    assert kind == "upsert"
    assert value["value"]["id"] == answer.headers["x-meshnet-call"]
    again.close()
    too_far = await watch(tracker, last=10**9)
    _, kind, _ = await anext(events(too_far))
    assert kind == "snapshot"
    too_far.close()
    steady.close()


async def test_the_console_answers_with_what_is_new_or_changed(tracker: Running) -> None:
    node = await tracker.node()
    first = await tracker.get("/api/console")
    assert [entry["event"] for entry in first["events"]] == ["node joined", "node ready"]
    node.script.tokens, node.script.interval_s = 60, 0.02
    call = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: bool(node.seen) and node.seen[0].computed > 10)
    second = await tracker.get(f"/api/console?since={first['next']}")
    assert [entry["event"] for entry in second["events"]][:2] == ["proxy route selected", "proxy connected"]
    await call
    third = await tracker.get(f"/api/console?since={second['next']}")
    assert [entry["event"] for entry in third["events"]] == ["proxy progress", "proxy complete"]
    progress = [e for e in (await tracker.get("/api/console"))["events"] if e["event"] == "proxy progress"]
    assert len(progress) == 1
    assert progress[0]["output_tokens"] == 60
    for since in ("x", "-1", str(10**15 + 1)):
        async with tracker.http.get(
            f"{tracker.base}/api/console?since={since}", headers=tracker.admin()
        ) as refused:
            assert refused.status == 400
            assert (await refused.json())["error"]["param"] == "since"


def test_the_console_is_a_ring_and_updates_in_place() -> None:
    console = Console(3, lambda: 0)
    seqs = [console.add("e", str(n)) for n in range(5)]
    found, following = console.since(0, lambda entry: True)
    assert [entry["line"] for entry in found] == ["2", "3", "4"]
    assert not console.update(seqs[0], "gone")
    assert console.update(seqs[3], "changed")
    found, _ = console.since(following, lambda entry: True)
    assert [(entry["seq"], entry["line"]) for entry in found] == [(seqs[3], "changed")]


async def test_a_viewer_that_does_not_read_gets_a_fresh_snapshot_instead_of_a_growing_queue() -> None:
    feed = Feed(outbox=5)
    viewer = feed.open(admin=True, key_id=None)
    assert viewer.stale
    feed.snapshot(viewer, {})
    for number in range(5):
        feed.upsert("node", number, ADMINS)
    assert not viewer.stale
    feed.upsert("node", 5, ADMINS)
    assert viewer.stale
    feed.upsert("node", 6, ADMINS)
    assert feed.snapshot(viewer, {}).startswith(b"id: 7\n")
    feed.upsert("node", 8, ADMINS)
    assert viewer.take().startswith(b"id: 8\n")


async def test_touches_are_throttled_and_the_last_state_goes_out() -> None:
    feed = Feed(outbox=100)
    viewer = feed.open(admin=True, key_id=None)
    feed.snapshot(viewer, {})
    state = 0
    for state in range(1, 51):
        feed.touch("call", "c", 0.25, lambda state=state: (state, EVERYONE))  # type: ignore[misc]
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    shown = [
        json.loads(line[6:])["value"]
        for line in viewer.take().decode().split("\n")
        if line.startswith("data")
    ]
    assert shown[0] == 1
    assert shown[-1] == 50
    assert len(shown) <= 5


async def test_audiences_keep_events_apart() -> None:
    feed = Feed(outbox=100)
    one, two, admin = feed.open(False, 1), feed.open(False, 2), feed.open(True, 3)
    for viewer in (one, two, admin):
        feed.snapshot(viewer, {})
    feed.upsert("call", "of one", Audience(1))
    feed.upsert("node", "for admins", ADMINS)
    feed.upsert("model", "for all", EVERYONE)
    assert [len(v.take().split(b"\n\n")) - 1 for v in (one, two, admin)] == [2, 1, 3]


async def test_spans_of_calls_and_stages_where_tracing_is_on(tracker: Running) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider

    await tracker.node(name="head", layers=(0, 14))
    await tracker.node(name="tail", layers=(15, 29))
    exporter = memory.InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    assert tracker.server.tracker is not None
    tracker.server.tracker.recorder.tracing = Tracing(provider, tracker.server.tracker.roster)
    answer = await tracker.chat()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"meshnet.call", "stage 0-14", "stage 15-29"}
    call = spans["meshnet.call"]
    assert call.attributes["meshnet.call_id"] == answer.headers["x-meshnet-call"]
    assert [event.name for event in call.events][:2] == ["accepted", "route_selected"]
    assert spans["stage 0-14"].parent.span_id == call.context.span_id
    assert spans["stage 15-29"].attributes["meshnet.node"] == "tail"


async def test_metrics_count_calls_and_tokens(tracker: Running) -> None:
    await tracker.node(name="mini")
    await tracker.chat()
    async with tracker.http.get(f"{tracker.base}/metrics") as answer:
        text = await answer.text()
    assert shown(text) == documented(node=False)
    assert 'meshnet_calls_total{model="toy",outcome="complete"} 1.0' in text
    assert 'meshnet_tokens_total{kind="output",model="toy"} 8.0' in text
    assert 'meshnet_nodes{state="ready"} 1.0' in text
    assert 'meshnet_time_to_first_token_seconds_count{model="toy"} 1.0' in text
    assert 'meshnet_free_slots{model="toy",node="mini"} 8.0' in text
