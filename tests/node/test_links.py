"""Links that swallow, stand still, break and are far."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from node.bench import LAST, Bench, BenchNode
from support.proxy import Proxy

from meshnet.node.call import Call
from meshnet.node.measure import measure
from meshnet.protocol import calls

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The bridge over the river was"
TOKENS = 12


@dataclass
class Far:
    """A head, a tail behind a proxy, and another tail to go on with."""

    bench: Bench
    head: BenchNode
    tail: BenchNode
    other: BenchNode
    proxy: Proxy
    expected: list[int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(bench: Bench) -> AsyncIterator[Far]:
    head = await bench.add(0, 14, n_ctx=256)
    tail = await bench.add(15, LAST, n_ctx=256)
    other = await bench.add(15, LAST, n_ctx=256)
    expected = (await bench.run([head, other], PROMPT, max_tokens=TOKENS)).ids()
    async with Proxy("127.0.0.1", tail.server.port) as proxy:
        tail.address_override = proxy.address
        yield Far(bench, head, tail, other, proxy, expected)


async def disturbed(far: Far, disturb: object, at: int = 4) -> tuple[calls.LostNode, float]:
    """Runs a call over the proxy, disturbs it, sends it to the other tail; the loss and how long it took
    from the disturbance to the loss. The tokens are the right ones."""
    seen, began, noticed = 0, 0.0, 0.0

    def on_event(call: Call, event: calls.AnyEvent) -> None:
        nonlocal seen, began, noticed
        if isinstance(event, calls.TokenEvent):
            seen += 1
            if seen == at:
                began = time.monotonic()
                assert callable(disturb)
                disturb()
        elif isinstance(event, calls.LostNode):
            noticed = time.monotonic()
            stages = [far.head.stage(), far.other.stage()]
            text = far.bench.ticket(call.call_id, call.epoch + 1, stages)
            far.head.heads.reroute(call.call_id, calls.Reroute(call.epoch + 1, text, ()))

    answer = await far.bench.run([far.head, far.tail], PROMPT, max_tokens=TOKENS, on_event=on_event)
    assert answer.ids() == far.expected
    (lost,) = answer.of(calls.LostNode)
    return lost, noticed - began


async def test_a_link_that_swallows_is_noticed_within_its_deadline(far: Far) -> None:
    lost, seconds = await disturbed(far, lambda: far.proxy.set(swallow=True))
    far.proxy.cut()
    far.proxy.set(swallow=False)
    far.proxy.mend()
    assert (lost.node_id, lost.code) == (far.tail.node_id, "deadline")
    assert "said nothing" in lost.message
    assert 2.5 <= seconds < 3 * 3.0
    far.tail.stages.close_call("call")
    for session in list(far.tail.stages.sessions.values()):
        far.tail.stages.discard(session)
    await far.bench.settled()


async def test_a_broken_link_is_noticed_at_once(far: Far) -> None:
    lost, seconds = await disturbed(far, far.proxy.cut)
    far.proxy.mend()
    assert (lost.node_id, lost.code) == (far.tail.node_id, "unreachable")
    assert seconds < 1.5
    for session in list(far.tail.stages.sessions.values()):
        far.tail.stages.discard(session)
    await far.bench.settled()


async def test_an_engine_that_stands_still_is_noticed_though_its_node_answers(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshnet.node.deadlines.CEILING_S", 3.0)
    lost, seconds = await disturbed(far, lambda: far.tail.stages.executor.post(lambda: time.sleep(6)))
    assert (lost.node_id, lost.code) == (far.tail.node_id, "deadline")
    assert "no progress" in lost.message
    assert 2.5 <= seconds < 9.0
    for session in list(far.tail.stages.sessions.values()):
        far.tail.stages.discard(session)
    await far.bench.settled(seconds=15)


async def test_a_far_link_changes_nothing_but_the_time(far: Far) -> None:
    far.proxy.set(delay_s=0.02)
    try:
        answer = await far.bench.run([far.head, far.tail], PROMPT, max_tokens=TOKENS)
        told = await measure(far.tail.node_id, far.tail.address)
    finally:
        far.proxy.set(delay_s=0.0)
    assert answer.ids() == far.expected
    assert not answer.of(calls.LostNode)
    assert 20.0 <= told.ms < 60.0
    assert told.bytes_per_s > 0
    await far.bench.settled()


async def test_a_peer_out_of_reach_is_told_in_words() -> None:
    told = await measure("node-y", "127.0.0.1:9")
    assert told.error.startswith("cannot reach node-y at 127.0.0.1:9")


async def test_another_node_at_the_address_is_refused(far: Far) -> None:
    wrong = far.other.stage()
    stage = calls.RouteStage("somebody-else", wrong.start_layer, wrong.end_layer, wrong.grpc_address)

    async def give_up(call: Call, event: calls.AnyEvent) -> None:
        if isinstance(event, calls.LostNode):
            lost.append(event)
            await far.head.heads.cancel(call)

    lost: list[calls.LostNode] = []
    await far.bench.run([far.head.stage(), stage], PROMPT, on_event=give_up)
    assert (lost[0].node_id, lost[0].code) == ("somebody-else", "refused")
    assert far.other.node_id in lost[0].message


async def test_peers_use_one_stream_for_all_sessions(far: Far) -> None:
    await far.bench.run([far.head, far.other], PROMPT, max_tokens=2)
    count = len(far.head.links)
    for _ in range(3):
        await far.bench.run([far.head, far.other], PROMPT, max_tokens=2)
    assert len(far.head.links) == count


async def test_garbage_instead_of_grpc(far: Far) -> None:
    """Something else listens there: the loss is said, in time."""
    async with Proxy("127.0.0.1", 9) as nothing:
        channel = grpc.aio.insecure_channel(nothing.address)
        await channel.close()
        stage = calls.RouteStage("not-there", 15, LAST, nothing.address)
        lost: list[calls.LostNode] = []

        async def give_up(call: Call, event: calls.AnyEvent) -> None:
            if isinstance(event, calls.LostNode):
                lost.append(event)
                await far.head.heads.cancel(call)

        await far.bench.run([far.head.stage(), stage], PROMPT, on_event=give_up)
    assert (lost[0].node_id, lost[0].code) == ("not-there", "unreachable")
    assert "cannot reach not-there" in lost[0].message
