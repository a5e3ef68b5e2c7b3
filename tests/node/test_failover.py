"""A stage is lost, and the answer is what it would have been: token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from node.bench import LAST, Answer, Bench, BenchNode

from meshnet.node.call import Call
from meshnet.node.ring import SentRing
from meshnet.protocol import calls
from meshnet.protocol.calls import RouteStage

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The old lighthouse keeper climbed the stairs every evening, because"
OPTIONS: dict[str, Any] = {"max_tokens": 20}
SAMPLED: dict[str, Any] = {
    "max_tokens": 20,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 7,
    "presence_penalty": 0.5,
}


@dataclass
class Spare:
    """Two heads and two tails that never die, with a middle that the tests add; and the right answers."""

    bench: Bench
    head: BenchNode
    other_head: BenchNode
    tail: BenchNode
    other_tail: BenchNode
    greedy: list[int]
    sampled: list[int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spare(bench: Bench) -> AsyncIterator[Spare]:
    head = await bench.add(0, 9, n_slots=6, n_ctx=512)
    other_head = await bench.add(0, 9, n_slots=6, n_ctx=512)
    tail = await bench.add(10, LAST, cuts=(20,), n_slots=6, n_ctx=512)
    other_tail = await bench.add(10, LAST, cuts=(20,), n_slots=6, n_ctx=512)
    greedy = (await bench.run([head, tail], PROMPT, **OPTIONS)).ids()
    sampled = (await bench.run([head, tail], PROMPT, **SAMPLED)).ids()
    assert greedy != sampled
    yield Spare(bench, head, other_head, tail, other_tail, greedy, sampled)


def after(
    tokens: int, do: Callable[[], Awaitable[object]], reroute: Callable[[Call], object]
) -> Callable[[Call, calls.AnyEvent], Awaitable[None]]:
    """Acts once so many tokens have come, and names a new route for every lost one."""
    seen = 0

    async def on_event(call: Call, event: calls.AnyEvent) -> None:
        nonlocal seen
        if isinstance(event, calls.TokenEvent):
            seen += 1
            if seen == tokens:
                await do()
        elif isinstance(event, calls.LostNode):
            reroute(call)

    return on_event


def rerouting(bench: Bench, *routes: Sequence[RouteStage]) -> Callable[[Call], None]:
    """Names these routes one after the other, each with the next epoch."""
    left = list(routes)

    def reroute(call: Call) -> None:
        stages = left.pop(0)
        head = next(node for node in bench.nodes if node.node_id == stages[0].node_id)
        text = bench.ticket(call.call_id, call.epoch + 1, stages)
        head.heads.reroute(call.call_id, calls.Reroute(call.epoch + 1, text, ()))

    return reroute


def lost(answer: Answer) -> list[tuple[str, str]]:
    return [(event.node_id, event.code) for event in answer.of(calls.LostNode)]


@pytest.mark.parametrize("moment", [1, 7])
@pytest.mark.parametrize("sampled", [False, True])
async def test_a_killed_tail_is_replaced(spare: Spare, moment: int, sampled: bool) -> None:
    bench = spare.bench
    doomed = await bench.add(10, LAST, n_ctx=512)
    reroute = rerouting(bench, [spare.head.stage(), spare.other_tail.stage()])
    answer = await bench.run(
        [spare.head, doomed],
        PROMPT,
        on_event=after(moment, doomed.kill, reroute),
        **(SAMPLED if sampled else OPTIONS),
    )
    assert answer.ids() == (spare.sampled if sampled else spare.greedy)
    assert lost(answer) == [(doomed.node_id, "unreachable")]
    (rerouted,) = answer.of(calls.Rerouted)
    assert rerouted.epoch == 1
    assert rerouted.replayed_rows >= answer.of(calls.Opened)[0].prompt_tokens
    await bench.settled()


async def test_the_sender_replays_what_it_kept(spare: Spare) -> None:
    """The head computes nothing again: the substitute gets the hidden states that were sent before."""
    bench = spare.bench
    doomed = await bench.add(10, LAST, n_ctx=512)
    before = spare.head.stages.state.counters
    rows = before.prefill_tokens, before.decode_tokens
    reroute = rerouting(bench, [spare.head.stage(), spare.other_tail.stage()])
    answer = await bench.run([spare.head, doomed], PROMPT, on_event=after(6, doomed.kill, reroute), **OPTIONS)
    assert answer.ids() == spare.greedy
    counters = spare.head.stages.state.counters
    assert counters.prefill_tokens - rows[0] == answer.of(calls.Opened)[0].prompt_tokens
    assert counters.decode_tokens - rows[1] <= OPTIONS["max_tokens"]
    await bench.settled()


async def test_what_fell_out_of_the_ring_is_computed_again(spare: Spare) -> None:
    bench = spare.bench
    forgetful = await bench.add(0, 9, n_ctx=512, ring=SentRing(limit=4 * 576 * 4))
    doomed = await bench.add(10, LAST, n_ctx=512)
    reroute = rerouting(bench, [forgetful.stage(), spare.other_tail.stage()])
    answer = await bench.run([forgetful, doomed], PROMPT, on_event=after(9, doomed.kill, reroute), **OPTIONS)
    assert answer.ids() == spare.greedy
    assert forgetful.stages.state.counters.prefill_tokens > answer.of(calls.Opened)[0].prompt_tokens
    await bench.settled()


@pytest.mark.parametrize("sampled", [False, True])
async def test_a_killed_middle_is_replaced_and_the_tail_keeps_its_session(
    spare: Spare, sampled: bool
) -> None:
    bench = spare.bench
    doomed = await bench.add(10, 19, n_ctx=512)
    last = spare.tail.stage(20, LAST)
    reroute = rerouting(bench, [spare.head.stage(), spare.other_tail.stage(10, 19), last])
    before = spare.tail.stages.state.counters.prefill_tokens
    answer = await bench.run(
        [spare.head.stage(), doomed.stage(), last],
        PROMPT,
        on_event=after(5, doomed.kill, reroute),
        **(SAMPLED if sampled else OPTIONS),
    )
    assert answer.ids() == (spare.sampled if sampled else spare.greedy)
    assert [node for node, _ in lost(answer)] == [doomed.node_id]
    rows = spare.tail.stages.state.counters.prefill_tokens - before
    prompt = answer.of(calls.Opened)[0].prompt_tokens
    assert prompt <= rows <= prompt + 2, "the tail computes its prompt once"
    await bench.settled()


async def test_two_nodes_die_one_after_the_other(spare: Spare) -> None:
    bench = spare.bench
    first, second = await bench.add(10, LAST, n_ctx=512), await bench.add(10, LAST, n_ctx=512)
    moments = {3: first.kill, 9: second.kill}
    reroute = rerouting(bench, [spare.head.stage(), second.stage()], [spare.head.stage(), spare.tail.stage()])
    seen = 0

    async def on_event(call: Call, event: calls.AnyEvent) -> None:
        nonlocal seen
        if isinstance(event, calls.TokenEvent):
            seen += 1
            if seen in moments:
                await moments[seen]()
        elif isinstance(event, calls.LostNode):
            reroute(call)

    answer = await bench.run([spare.head, first], PROMPT, on_event=on_event, **SAMPLED)
    assert answer.ids() == spare.sampled
    assert [node for node, _ in lost(answer)] == [first.node_id, second.node_id]
    await bench.settled()


async def test_other_cuts_after_a_loss(spare: Spare) -> None:
    """The substitute route has other borders, so nothing of the old one below the head fits."""
    bench = spare.bench
    doomed = await bench.add(10, LAST, n_ctx=512)
    reroute = rerouting(
        bench, [spare.head.stage(), spare.tail.stage(10, 19), spare.other_tail.stage(20, LAST)]
    )
    answer = await bench.run([spare.head, doomed], PROMPT, on_event=after(4, doomed.kill, reroute), **OPTIONS)
    assert answer.ids() == spare.greedy
    await bench.settled()


@pytest.mark.parametrize("middle", [False, True])
async def test_a_stage_that_is_passed_by_though_it_lives_lets_go(spare: Spare, middle: bool) -> None:
    """The tracker may give up a node before its neighbours do: nothing of the call stays there."""
    bench = spare.bench
    passed = await bench.add(10, 19 if middle else LAST, n_ctx=512)
    before = [spare.head.stage(), passed.stage()] + ([spare.tail.stage(20)] if middle else [])
    reroute = rerouting(bench, [spare.head.stage(), spare.other_tail.stage()])

    async def on_event(call: Call, event: calls.AnyEvent) -> None:
        if isinstance(event, calls.TokenEvent) and call.epoch == 0 and len(passed.stages.sessions) == 1:
            reroute(call)
            while call.epoch == 0:
                await asyncio.sleep(0)

    answer = await bench.run(before, PROMPT, on_event=on_event, **OPTIONS)
    assert answer.ids() == spare.greedy
    assert not lost(answer)
    await bench.settled()


async def test_a_node_with_one_slot_goes_on_at_other_layers(spare: Spare) -> None:
    """What it held for the route that broke makes room for its part in the new one."""
    bench = spare.bench
    doomed = await bench.add(10, 19, n_ctx=512)
    tail = await bench.add(10, LAST, cuts=(20,), n_ctx=512, n_slots=1)
    reroute = rerouting(bench, [spare.head.stage(), tail.stage()])
    route = [spare.head.stage(), doomed.stage(), tail.stage(20)]
    answer = await bench.run(route, PROMPT, on_event=after(6, doomed.kill, reroute), **OPTIONS)
    assert answer.ids() == spare.greedy
    assert len(lost(answer)) == 1
    await bench.settled()


async def test_a_route_that_never_stood(spare: Spare) -> None:
    """The tail is gone before the first open; the call begins on the next route."""
    bench = spare.bench
    gone = await bench.add(10, LAST, n_ctx=512)
    await gone.kill()
    reroute = rerouting(bench, [spare.head.stage(), spare.tail.stage()])
    answer = await bench.run([spare.head, gone], PROMPT, on_event=after(-1, gone.kill, reroute), **OPTIONS)
    assert answer.ids() == spare.greedy
    assert lost(answer) == [(gone.node_id, "unreachable")]
    await bench.settled()


async def test_a_route_that_is_named_while_the_first_one_fails_is_taken(spare: Spare) -> None:
    """The tracker may know of a death before the head does, and names it only once."""
    bench = spare.bench
    gone = await bench.add(10, LAST, n_ctx=512)
    await gone.kill()
    call = await spare.head.heads.start(bench.request([spare.head.stage(), gone.stage()], PROMPT, **OPTIONS))
    text = bench.ticket(call.call_id, 1, [spare.head.stage(), spare.tail.stage()])
    spare.head.heads.reroute(call.call_id, calls.Reroute(1, text, ()))
    answer = await bench.follow(call)
    assert answer.ids() == spare.greedy
    assert lost(answer) == [(gone.node_id, "unreachable")]
    await bench.settled()


async def test_choices_survive(spare: Spare) -> None:
    bench = spare.bench
    options = {**SAMPLED, "n": 2, "max_tokens": 12}
    undisturbed = await bench.run([spare.head, spare.tail], PROMPT, **options)
    doomed = await bench.add(10, LAST, n_ctx=512)
    reroute = rerouting(bench, [spare.head.stage(), spare.other_tail.stage()])
    answer = await bench.run([spare.head, doomed], PROMPT, on_event=after(8, doomed.kill, reroute), **options)
    assert [answer.ids(choice) for choice in range(2)] == [undisturbed.ids(choice) for choice in range(2)]
    await bench.settled()


@pytest.mark.parametrize("sampled", [False, True])
async def test_another_head_goes_on(spare: Spare, sampled: bool) -> None:
    """The head is gone; another takes over from the tokens that were sent, on the same tail."""
    bench = spare.bench
    options, expected = (SAMPLED, spare.sampled) if sampled else (OPTIONS, spare.greedy)
    doomed = await bench.add(0, 9, n_ctx=512)
    request = bench.request([doomed.stage(), spare.tail.stage()], PROMPT, **options)
    call = await doomed.heads.start(request)
    got: list[int] = []
    spans: tuple[tuple[int, int], ...] = ()
    while len(got) < 6:
        for event in await call.events.take():
            if isinstance(event, calls.TokenEvent):
                got.extend(event.ids)
            elif isinstance(event, calls.Opened):
                spans = event.spans
    await doomed.kill()
    answer = await bench.run(
        [spare.other_head, spare.tail],
        PROMPT,
        call_id=request.call_id,
        epoch=1,
        resume=(tuple(got),),
        spans=spans,
        **options,
    )
    assert got + answer.ids() == expected
    await doomed.heads.stop()
    await bench.settled()


async def test_a_lost_route_without_another_is_given_up(spare: Spare) -> None:
    """The reader goes while the call waits for a route: everything is free at once."""
    bench = spare.bench
    doomed = await bench.add(10, LAST, n_ctx=512)
    request = bench.request([spare.head.stage(), doomed.stage()], PROMPT, **OPTIONS)
    call = await spare.head.heads.start(request)
    seen: list[calls.AnyEvent] = []
    while not any(isinstance(event, calls.LostNode) for event in seen):
        seen.extend(await call.events.take())
        if not doomed.dead and any(isinstance(event, calls.TokenEvent) for event in seen):
            await doomed.kill()
    await spare.head.heads.cancel(call)
    await bench.settled(seconds=3.0)


async def test_many_streams_at_once_through_one_death(spare: Spare) -> None:
    bench = spare.bench
    prompts = [f"{PROMPT} of the number {number},"[-60:] for number in range(4)]
    route = [spare.head, spare.tail]
    expected = [(await bench.run(route, prompt, **OPTIONS)).ids() for prompt in prompts]
    doomed = await bench.add(10, LAST, n_ctx=512, n_slots=6)
    reroutes = [rerouting(bench, [spare.head.stage(), spare.other_tail.stage()]) for _ in prompts]
    answers = await asyncio.gather(
        *(
            bench.run([spare.head, doomed], prompt, on_event=after(5, doomed.kill, reroute), **OPTIONS)
            for prompt, reroute in zip(prompts, reroutes, strict=True)
        )
    )
    assert [answer.ids() for answer in answers] == expected
    await bench.settled()


async def test_a_living_stage_above_a_dead_one_is_let_go(spare: Spare) -> None:
    """The middle reports the tail's death and is not part of the new route: it must not stay occupied."""
    bench = spare.bench
    middle = await bench.add(10, 19, n_ctx=512)
    doomed = await bench.add(20, LAST, n_ctx=512)
    reroute = rerouting(bench, [spare.head.stage(), spare.other_tail.stage()])
    answer = await bench.run(
        [spare.head, middle, doomed], PROMPT, on_event=after(4, doomed.kill, reroute), **OPTIONS
    )
    assert answer.ids() == spare.greedy
    assert [node for node, _ in lost(answer)] == [doomed.node_id]
    await bench.settled(seconds=3.0)
