"""Calls that lose nodes of their route, on the tracker's side of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from tracker.conftest import Running, Start, events_of
from tracker.wire_node import Seen, WireNode

COUNT = 40


def text_of(body: str) -> str:
    chunks = [json.loads(data) for data in events_of(body) if data != "[DONE]"]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())
    )


WHOLE = "".join(f" t{k}" for k in range(COUNT))


async def split(tracker: Running, **tail: Any) -> tuple[WireNode, WireNode]:
    """A head and a cheap tail; every node emits COUNT tokens, one each 20 ms."""
    nodes = []
    for options in ({"layers": (0, 14), "name": "head"}, {"layers": (15, 29), "name": "tail", **tail}):
        node = await tracker.node(**options)
        node.script.tokens, node.script.interval_s = COUNT, 0.02
        nodes.append(node)
    return nodes[0], nodes[1]


async def whole_text(
    tracker: Running, head: WireNode, act: Callable[[Seen], Any], **body: Any
) -> tuple[str, str]:
    """Runs a call, lets `act` break something in the middle; the whole body and the call's id."""
    answer = await tracker.chat(stream=True, **body)
    assert answer.status == 200, await answer.text()
    first = await answer.content.readany()
    call_id = answer.headers["x-meshnet-call"]
    seen = next(s for s in head.seen if s.call.call_id == call_id)
    while seen.computed < 10:
        await asyncio.sleep(0.01)
    result = act(seen)
    if asyncio.iscoroutine(result):
        await result
    rest = await asyncio.wait_for(answer.content.read(), 30)
    return (first + rest).decode(), call_id


async def test_a_lost_downstream_node_is_replaced_and_the_head_goes_on(tracker: Running) -> None:
    head, tail = await split(tracker)
    spare = await tracker.node(layers=(15, 29), name="spare", decode_ms=5.0)
    body, call_id = await whole_text(
        tracker, head, lambda seen: seen.lost.put_nowait((tail.node_id, "unreachable"))
    )
    assert text_of(body) == WHOLE
    assert body.endswith("data: [DONE]\n\n")
    reroute = head.seen[0].reroutes[0]
    assert reroute.epoch == 1
    assert reroute.failed == (tail.node_id,)
    assert [s.node_id for s in head.seen[0].ticket.stages] == [head.node_id, spare.node_id]
    assert head.seen[0].ticket.epoch == 1
    assert len(head.seen) == 1
    call = await tracker.get(f"/api/calls/{call_id}")
    assert call["reroutes"] == 1
    assert not call["numerics_changed"]
    rerouted = next(m for m in call["timeline"] if m["event"] == "rerouted")
    assert rerouted["detail"]["before"] == "head[0-14]>tail[15-29]"
    assert rerouted["detail"]["after"] == "head[0-14]>spare[15-29]"
    assert rerouted["detail"]["why"] == "unreachable in a test"
    console = (await tracker.get("/api/console"))["events"]
    assert any(e["event"] == "proxy rerouted" and e["call_id"] == call_id for e in console)


async def test_two_nodes_die_one_after_the_other(tracker: Running) -> None:
    head, tail = await split(tracker)
    second = await tracker.node(layers=(15, 29), name="second", decode_ms=5.0)
    third = await tracker.node(layers=(15, 29), name="third", decode_ms=9.0)

    async def act(seen: Seen) -> None:
        seen.lost.put_nowait((tail.node_id, "unreachable"))
        while not seen.reroutes or seen.computed < 20:
            await asyncio.sleep(0.01)
        seen.lost.put_nowait((second.node_id, "deadline"))

    body, call_id = await whole_text(tracker, head, act)
    assert text_of(body) == WHOLE
    assert [s.node_id for s in head.seen[0].ticket.stages] == [head.node_id, third.node_id]
    assert (await tracker.get(f"/api/calls/{call_id}"))["reroutes"] == 2


async def test_another_head_takes_over_from_the_tokens_already_sent(tracker: Running) -> None:
    head = await tracker.node(name="first")
    head.script.tokens, head.script.interval_s = COUNT, 0.02
    other = await tracker.node(name="second", decode_ms=5.0)
    other.script.tokens, other.script.interval_s = COUNT, 0.02
    tracker.nodes.remove(head)
    body, call_id = await whole_text(tracker, head, lambda seen: head.vanish())
    assert text_of(body) == WHOLE
    again = other.seen[0].call
    assert again.epoch == 1
    assert again.call_id == head.seen[0].call.call_id
    assert again.seed == head.seen[0].call.seed
    assert again.resume[0] == tuple(100 + k for k in range(len(again.resume[0])))
    assert len(again.resume[0]) >= 10
    call = await tracker.get(f"/api/calls/{call_id}")
    assert call["reroutes"] == 1
    assert call["output_tokens"] == COUNT


async def test_a_head_that_is_stopped_is_left_when_its_lease_runs_out(start: Start) -> None:
    tracker = await start(heartbeat_ms=100, lease_ms=600)
    head = await tracker.node(name="first")
    head.script.tokens, head.script.interval_s = COUNT, 0.02
    other = await tracker.node(name="second", decode_ms=5.0)
    other.script.tokens = COUNT

    def stop(seen: Seen) -> None:
        seen.frozen = True
        head.beating = False

    body, _ = await whole_text(tracker, head, stop)
    assert text_of(body) == WHOLE


async def test_a_head_that_beats_but_sends_nothing_misses_its_deadline(start: Start) -> None:
    tracker = await start(head_silence_s=1.0)
    head = await tracker.node(name="first")
    head.script.tokens, head.script.interval_s = COUNT, 0.02
    other = await tracker.node(name="second", decode_ms=5.0)
    other.script.tokens = COUNT

    def freeze(seen: Seen) -> None:
        seen.frozen = True

    body, call_id = await whole_text(tracker, head, freeze)
    assert text_of(body) == WHOLE
    call = await tracker.get(f"/api/calls/{call_id}")
    assert any(m["event"] == "lost" and m["detail"]["code"] == "deadline" for m in call["timeline"])


async def test_a_head_that_has_much_to_do_and_says_that_it_lives_is_waited_for(start: Start) -> None:
    tracker = await start(head_silence_s=1.0)
    head = await tracker.node(name="first")
    head.script.tokens, head.script.interval_s = COUNT, 0.02
    await tracker.node(name="second", decode_ms=5.0)

    async def busy(seen: Seen) -> None:
        seen.frozen = seen.says_alive = True
        await asyncio.sleep(3.0)  # longer than it may be silent
        seen.frozen = False

    body, call_id = await whole_text(tracker, head, busy)
    assert text_of(body) == WHOLE
    assert (await tracker.get(f"/api/calls/{call_id}"))["reroutes"] == 0


async def test_without_another_holder_the_call_ends_with_route_lost_and_its_partial_text(
    tracker: Running,
) -> None:
    head, tail = await split(tracker)

    async def die(seen: Seen) -> None:
        tracker.nodes.remove(tail)
        await tail.vanish()
        seen.lost.put_nowait((tail.node_id, "unreachable"))

    body, call_id = await whole_text(tracker, head, die)
    *_, error, done = events_of(body)
    assert json.loads(error)["error"]["code"] == "route_lost"
    assert done == "[DONE]"
    partial = text_of(body)
    assert partial
    assert WHOLE.startswith(partial)
    call = await tracker.get(f"/api/calls/{call_id}")
    assert (call["phase"], call["error"]["code"]) == ("failed", "route_lost")
    await asyncio.wait_for(head.seen[0].closed.wait(), 3)
    assert tracker.server.tracker is not None
    assert dict(tracker.server.tracker.orchestrator.placement.state.holds) == {}


async def test_the_only_holder_is_tried_again_while_it_is_in_the_mesh(tracker: Running) -> None:
    """It may be back already, or only the link to it broke."""
    head, tail = await split(tracker)
    body, call_id = await whole_text(
        tracker, head, lambda seen: seen.lost.put_nowait((tail.node_id, "unreachable"))
    )
    assert text_of(body) == WHOLE
    assert (await tracker.get(f"/api/calls/{call_id}"))["reroutes"] == 1


async def test_the_tails_only_holder_dies_and_there_is_no_route_never_a_shortened_model(
    tracker: Running,
) -> None:
    head, tail = await split(tracker)
    tracker.nodes.remove(tail)
    await tail.vanish()
    await tracker.until(lambda: tracker.state(tail) == "lost")
    answer = await tracker.chat()
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    error = (await answer.json())["error"]
    assert error["code"] == "no_route"
    assert "layers 0-29" in error["message"]
    assert "layer 15" in error["message"]
    assert head.seen == []
    async with tracker.http.get(f"{tracker.base}/readyz") as ready:
        assert ready.status == 503
        assert (await ready.json())["missing"] == {"toy": [[15, 29]]}


async def test_a_configured_fallback_model_answers_when_nothing_was_sent(start: Start) -> None:
    tracker = await start(fallback_models={"toy": "small"})
    _, tail = await split(tracker)
    small = await tracker.node(model="small", model_layers=4, layers=(0, 3))
    tracker.nodes.remove(tail)
    await tail.vanish()
    await tracker.until(lambda: tracker.state(tail) == "lost")
    answer = await tracker.chat()
    assert answer.status == 200
    assert (await answer.json())["model"] == "small"
    assert small.seen[0].call.model == "small"
    call = await tracker.get(f"/api/calls/{answer.headers['x-meshnet-call']}")
    assert call["degraded"]
    assert call["model"] == "small"


async def test_a_substitute_of_the_same_numerics_class_is_preferred(tracker: Running) -> None:
    head, tail = await split(tracker)
    await tracker.node(layers=(15, 29), name="fast-other", decode_ms=1.5, numerics_class="class-b")
    same = await tracker.node(layers=(15, 29), name="slow-same", decode_ms=9.0)
    body, call_id = await whole_text(
        tracker, head, lambda seen: seen.lost.put_nowait((tail.node_id, "unreachable"))
    )
    assert text_of(body) == WHOLE
    assert [s.node_id for s in head.seen[0].ticket.stages] == [head.node_id, same.node_id]
    assert not (await tracker.get(f"/api/calls/{call_id}"))["numerics_changed"]


async def test_another_numerics_class_is_taken_where_nothing_else_is_left_and_marked(
    tracker: Running,
) -> None:
    head, tail = await split(tracker)
    other = await tracker.node(layers=(15, 29), name="other", decode_ms=5.0, numerics_class="class-b")
    body, call_id = await whole_text(
        tracker, head, lambda seen: seen.lost.put_nowait((tail.node_id, "unreachable"))
    )
    assert text_of(body) == WHOLE
    assert [s.node_id for s in head.seen[0].ticket.stages] == [head.node_id, other.node_id]
    assert (await tracker.get(f"/api/calls/{call_id}"))["numerics_changed"]


async def test_nodes_that_a_call_has_left_are_told_so(tracker: Running) -> None:
    """A node may be alive and cut off from its neighbours only: nobody else can tell it."""
    head, tail = await split(tracker)
    spare = await tracker.node(layers=(15, 29), name="spare", decode_ms=5.0)
    _, call_id = await whole_text(
        tracker, head, lambda seen: seen.lost.put_nowait((tail.node_id, "deadline"))
    )

    def told(node: WireNode) -> list[tuple[str, int]]:
        closes = [d.close for d in node.directives if d.WhichOneof("kind") == "close"]
        return [(close.call_id, close.before_epoch) for close in closes]

    await tracker.until(lambda: len(told(tail)) == 2 and bool(told(head)) and bool(told(spare)))
    assert told(tail) == [(call_id, 1), (call_id, 0)]
    assert told(head) == told(spare) == [(call_id, 0)]


async def test_a_node_that_refuses_for_lack_of_slots_is_passed_over(tracker: Running) -> None:
    first = await tracker.node(name="first")
    first.script.refuse_status = 503
    second = await tracker.node(name="second", decode_ms=5.0)
    answer = await tracker.chat()
    assert answer.status == 200
    assert len(second.seen) == 1
    assert second.seen[0].call.epoch == 1


async def test_where_only_the_busy_node_is_left_the_call_waits_for_it(tracker: Running) -> None:
    node = await tracker.node()
    node.script.refuse_status = 503
    call = asyncio.create_task(tracker.chat())
    await asyncio.sleep(0.6)
    assert not call.done()
    node.script.refuse_status = 0
    assert (await call).status == 200


async def test_a_call_outlives_a_mesh_that_is_only_busy(start: Start) -> None:
    """Its substitute is full for longer than it may keep its head: it waits in front of the queue."""
    tracker = await start(park_s=0.1)
    head, tail = await split(tracker)
    spare = await tracker.node(layers=(15, 29), name="spare", decode_ms=5.0, slots=1)
    force = {"X-Meshnet-Nodes": "head,spare", **tracker.admin()}
    first = asyncio.create_task(tracker.chat(headers=force))
    await tracker.until(lambda: len(head.seen) == 1)
    body, call_id = await whole_text(
        tracker, head, lambda seen: seen.lost.put_nowait((tail.node_id, "unreachable"))
    )
    assert text_of(body) == WHOLE
    assert (await first).status == 200
    assert [(s.call.epoch, s.ticket.stages[-1].node_id) for s in head.seen if s.call.call_id == call_id] == [
        (0, tail.node_id),
        (1, spare.node_id),
    ]


async def test_a_downstream_node_that_the_mesh_loses_is_replaced_before_the_head_notices(
    tracker: Running,
) -> None:
    head, tail = await split(tracker)
    spare = await tracker.node(layers=(15, 29), name="spare", decode_ms=5.0)
    body, _ = await whole_text(tracker, head, lambda seen: tail.leave())
    assert text_of(body) == WHOLE
    assert head.seen[0].reroutes[0].failed == (tail.node_id,)
    assert [s.node_id for s in head.seen[0].ticket.stages] == [head.node_id, spare.node_id]


async def test_a_downstream_node_that_only_the_tracker_lost_stays_where_nobody_can_replace_it(
    tracker: Running,
) -> None:
    head, tail = await split(tracker)
    body, call_id = await whole_text(tracker, head, lambda seen: tail.leave())
    assert text_of(body) == WHOLE
    assert (await tracker.get(f"/api/calls/{call_id}"))["reroutes"] == 0


async def test_the_next_turn_of_a_conversation_goes_where_its_state_is(tracker: Running) -> None:
    first = await tracker.node(name="first", decode_ms=1.0)
    second = await tracker.node(name="second", decode_ms=1.2)
    for node in (first, second):
        node.script.prompt_tokens = 2000
        node.prefill_ms = 1.0
        node.report()
    await tracker.until(lambda: tracker.prefill_of(first) == 1.0 and tracker.prefill_of(second) == 1.0)
    long = "word " * 1500
    turns = [{"role": "user", "content": long}]
    await tracker.drain(first)
    assert (await tracker.chat(messages=turns)).headers["x-meshnet-route"] == "second[0-29]"
    await tracker.drain(first, on=False)
    turns += [{"role": "assistant", "content": WHOLE}, {"role": "user", "content": "and?"}]
    assert (await tracker.chat(messages=turns)).headers["x-meshnet-route"] == "second[0-29]"
    other = [{"role": "user", "content": "something else"}]
    assert (await tracker.chat(messages=other)).headers["x-meshnet-route"] == "first[0-29]"


async def test_a_new_head_is_told_how_the_prompt_was_cut(tracker: Running) -> None:
    head = await tracker.node(name="first")
    head.script.tokens, head.script.interval_s, head.script.spans = COUNT, 0.02, ((0, 3), (3, 5))
    other = await tracker.node(name="second", decode_ms=5.0)
    other.script.tokens = COUNT
    tracker.nodes.remove(head)
    body, _ = await whole_text(tracker, head, lambda seen: head.vanish())
    assert text_of(body) == WHOLE
    assert other.seen[0].call.spans == ((0, 3), (3, 5))


async def test_a_node_dies_while_the_call_is_in_prefill_and_while_it_waits(tracker: Running) -> None:
    first = await tracker.node(name="first", slots=1)
    first.script.first_s = 100
    call = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: len(first.open_calls) == 1)
    waiting = asyncio.create_task(tracker.chat())
    await asyncio.sleep(0.1)
    second = await tracker.node(name="second", slots=2, decode_ms=50.0)
    assert (await waiting).status == 200
    tracker.nodes.remove(first)
    await first.vanish()
    answer = await call
    assert answer.status == 200
    assert len(second.seen) == 2


async def test_a_call_that_is_not_streamed_survives_as_well(tracker: Running) -> None:
    head, tail = await split(tracker)
    spare = await tracker.node(layers=(15, 29), name="spare", decode_ms=5.0)
    call = asyncio.create_task(tracker.chat())
    await tracker.until(lambda: bool(head.seen) and head.seen[0].computed >= 5)
    head.seen[0].lost.put_nowait((tail.node_id, "unreachable"))
    answer = await call
    assert (await answer.json())["choices"][0]["message"]["content"] == WHOLE
    assert head.seen[0].ticket.stages[1].node_id == spare.node_id


async def test_a_head_dies_between_the_last_token_and_the_end(tracker: Running) -> None:
    head = await tracker.node(name="first")
    head.script.tokens, head.script.last_s = COUNT, 100
    other = await tracker.node(name="second", decode_ms=5.0)
    other.script.tokens = COUNT
    tracker.nodes.remove(head)
    answer = await tracker.chat(stream=True)
    first = await answer.content.readany()
    await tracker.until(lambda: head.seen[0].computed == COUNT)
    await head.vanish()
    body = (first + await asyncio.wait_for(answer.content.read(), 30)).decode()
    assert text_of(body) == WHOLE
    assert body.endswith("data: [DONE]\n\n")
    assert len(other.seen[0].call.resume[0]) == COUNT
