"""Calls over two and three nodes against the whole model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from node.bench import LAST, Bench, BenchNode

from meshnet.engine.tokenizer import Tokenizer
from meshnet.protocol import calls
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.dataplane_pb2_grpc import DataPlaneStub
from meshnet.protocol.errors import ApiError
from meshnet.routing import NodeState

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ("The sea was calm that morning, and", "To boil an egg, you first", "Once there was a king who")


def long_prompt(tokenizer: Tokenizer, length: int) -> list[int]:
    words = " ".join(f"{number} and" for number in range(300))
    tokens: list[int] = tokenizer.encode(words)[:length].tolist()
    assert len(tokens) == length
    return tokens


@dataclass
class Three:
    bench: Bench
    whole: BenchNode
    head: BenchNode
    tail: BenchNode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(bench: Bench) -> AsyncIterator[Three]:
    whole = await bench.add(0, LAST, n_slots=8, n_ctx=640)
    head = await bench.add(0, 14, n_slots=8, n_ctx=640)
    tail = await bench.add(15, LAST, n_slots=8, n_ctx=640)
    yield Three(bench, whole, head, tail)


async def test_cut_gives_the_whole_models_tokens(three: Three) -> None:
    for prompt in PROMPTS:
        alone = await three.bench.run([three.whole], prompt, max_tokens=48)
        cut = await three.bench.run([three.head, three.tail], prompt, max_tokens=48)
        assert cut.ids() == alone.ids()
        assert cut.text() == alone.text()
        assert len(set(cut.ids())) >= 20
        assert cut.end.by in ("limit", "eos")
    await three.bench.settled()


async def test_long_prompt_flows_in_chunks(three: Three, tokenizer: Tokenizer) -> None:
    prompt = long_prompt(tokenizer, 560)
    alone = await three.bench.run([three.whole], prompt, max_tokens=16)
    cut = await three.bench.run([three.head, three.tail], prompt, max_tokens=16, prefix_key="long")
    assert cut.ids() == alone.ids()
    (opened,) = cut.of(calls.Opened)
    assert opened.prompt_tokens == 560
    assert opened.spans == ((0, 256), (256, 512), (512, 560))
    done = [event.done for event in cut.of(calls.Prefill)]
    assert done == sorted(done)
    assert done[-1] <= 560
    (times,) = cut.of(calls.Stages)[-1:]
    assert [stage.start_layer for stage in times.stages] == [0, 15]
    assert all(stage.prefill_tokens == 560 for stage in times.stages)


async def test_sessions_at_once_are_independent(three: Three) -> None:
    prompts = [f"{prompt} {number}" for number in range(2) for prompt in PROMPTS]
    alone = [(await three.bench.run([three.head, three.tail], prompt)).ids() for prompt in prompts]
    together = await asyncio.gather(
        *(three.bench.run([three.head, three.tail], prompt) for prompt in prompts)
    )
    assert [answer.ids() for answer in together] == alone
    await three.bench.settled()


async def test_choices_share_the_prompt_and_draw_differently(three: Three) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 0.9, "max_tokens": 16, "seed": 5}
    before = three.head.stages.state.counters.prefill_tokens
    cut = await three.bench.run([three.head, three.tail], PROMPTS[0], **options)
    rows = three.head.stages.state.counters.prefill_tokens - before
    (opened,) = cut.of(calls.Opened)
    assert rows == opened.prompt_tokens - 1
    texts = [cut.text(choice) for choice in range(3)]
    assert len(set(texts)) == 3
    alone = await three.bench.run([three.whole], PROMPTS[0], **options)
    assert [alone.ids(choice) for choice in range(3)] == [cut.ids(choice) for choice in range(3)]
    await three.bench.settled()


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "seed": 5, "n": 2, "presence_penalty": 0.5, "logit_bias": [[260, 3.0]]}],
    ids=["greedy", "sampled"],
)
async def test_an_answer_is_weighed_by_another_route(three: Three, options: dict[str, Any]) -> None:
    """The whole model finds nothing in what the pipeline said, and the pipeline finds what was altered."""
    choice = options.get("n", 1) - 1
    said = await three.bench.run([three.head, three.tail], PROMPTS[2], max_tokens=12, **options)
    (opened,) = said.of(calls.Opened)
    answer = tuple(said.ids(choice))
    asked = {**options, "spans": opened.spans, "check_choice": choice, "max_tokens": len(answer) + 1}
    checked = await three.bench.run([three.whole], PROMPTS[2], check=answer, **asked)
    rows = [row for event in checked.of(calls.Weighed) for row in event.rows]
    assert [row.token for row in rows] == [row.drawn for row in rows] == list(answer)
    assert all(row.kept and row.logit <= row.max_logit for row in rows)
    assert isinstance(checked.events[-1], calls.Done)
    assert not checked.of(calls.TokenEvent)
    altered = (*answer[:5], answer[5] + 1000, *answer[6:])
    checked = await three.bench.run([three.head, three.tail], PROMPTS[2], check=altered, **asked)
    rows = [row for event in checked.of(calls.Weighed) for row in event.rows]
    assert [row.token for row in rows] == list(altered)
    assert rows[5].drawn == answer[5]
    assert rows[5].max_logit - rows[5].logit > 1.5
    with pytest.raises(ApiError, match="check_choice is 2"):
        await three.bench.run([three.whole], PROMPTS[2], check=answer, **{**asked, "check_choice": 2})
    await three.bench.settled()


async def test_sampling_is_the_seeds(three: Three) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}
    first = await three.bench.run([three.head, three.tail], PROMPTS[1], seed=1, **options)
    again = await three.bench.run([three.head, three.tail], PROMPTS[1], seed=1, **options)
    other = await three.bench.run([three.head, three.tail], PROMPTS[1], seed=2, **options)
    assert first.ids() == again.ids() != other.ids()


async def test_stop_strings_span_tokens_and_are_not_shown(three: Three) -> None:
    plain = await three.bench.run([three.head, three.tail], PROMPTS[0], max_tokens=32)
    text = plain.text()
    stop = text[10:16]
    stopped = await three.bench.run([three.head, three.tail], PROMPTS[0], max_tokens=32, stop=["zzz", stop])
    assert stopped.text() == text[: text.index(stop)]
    assert (stopped.end.reason, stopped.end.by) == ("stop", "stop_string")
    never = await three.bench.run(
        [three.head, three.tail], PROMPTS[0], max_tokens=32, stop=[text[-3:] + "zzz"]
    )
    assert never.text() == text


async def test_logprobs_and_alternatives(three: Three) -> None:
    answer = await three.bench.run([three.head, three.tail], PROMPTS[2], max_tokens=4, logprobs=3)
    for event in answer.of(calls.TokenEvent):
        (entry,) = event.lp
        piece, value, raw, top = entry
        assert bytes(raw).decode() == piece
        assert len(top) == 3
        assert top[0][0] == piece
        assert value == pytest.approx(top[0][1])
        assert top[0][1] >= top[1][1] >= top[2][1]


async def test_grammar_holds(three: Three) -> None:
    grammar = 'root ::= "yes" | "no"'
    answer = await three.bench.run([three.head, three.tail], PROMPTS[0], grammar=grammar)
    assert answer.text() in ("yes", "no")
    assert (answer.end.reason, answer.end.by) == ("stop", "grammar")


async def test_a_grammar_without_a_way_on_fails_the_call_and_blames_no_node(three: Three) -> None:
    grammar = r'root ::= "yes" [^\x00-\U7FFFFFFF]'
    answer = await three.bench.run([three.head, three.tail], PROMPTS[0], grammar=grammar)
    assert answer.text() == "yes"
    (error,) = answer.of(calls.CallError)
    assert (error.status, error.code, error.type) == (400, "grammar_failed", "invalid_request_error")
    assert not answer.of(calls.ChoiceEnd)
    assert not answer.of(calls.LostNode)
    await three.bench.settled()


async def test_chat_with_a_response_format(three: Three) -> None:
    message = [{"role": "user", "content": "Say a number as JSON with the key n."}]
    answer = await three.bench.run(
        [three.head, three.tail], message, max_tokens=200, response_format="json_object"
    )
    assert answer.text().lstrip().startswith("{")


async def test_context_ends_a_call(three: Three, tokenizer: Tokenizer) -> None:
    prompt = long_prompt(tokenizer, 632)
    answer = await three.bench.run([three.head, three.tail], prompt, max_tokens=100, prefix_key="long")
    assert len(answer.ids()) <= 8
    if answer.end.by != "eos":
        assert (answer.end.reason, answer.end.by) == ("length", "context")


async def test_prompt_longer_than_the_context_is_refused(three: Three) -> None:
    with pytest.raises(ApiError) as refused:
        await three.bench.run([three.head, three.tail], [5] * 640)
    assert refused.value.status == 400
    assert "640" in refused.value.message
    assert refused.value.code == "context_length_exceeded"


async def test_a_bias_on_a_token_that_is_none_is_the_requests_fault(three: Three) -> None:
    with pytest.raises(ApiError) as refused:
        await three.bench.run([three.head, three.tail], PROMPTS[0], logit_bias=[[10**8, 5.0]])
    assert (refused.value.status, refused.value.param) == (400, "logit_bias.100000000")


async def test_second_turn_goes_on_from_the_first(three: Three) -> None:
    first = [{"role": "user", "content": "Name three rivers in Europe, and say where they flow."}]
    options: dict[str, Any] = {"prefix_key": "account-1", "max_tokens": 20}
    route = [three.head, three.tail]
    answer = await three.bench.run(route, first, **options)
    second = [*first, {"role": "assistant", "content": answer.text()}, {"role": "user", "content": "Why?"}]
    before = three.tail.stages.state.counters.prefill_tokens
    warm = await three.bench.run(route, second, **options)
    (opened,) = warm.of(calls.Opened)
    assert opened.reused_tokens > 30
    assert (
        three.tail.stages.state.counters.prefill_tokens - before
        <= opened.prompt_tokens - opened.reused_tokens
    )
    cold = await three.bench.run(route, second, prefix_key="account-2", max_tokens=20)
    assert cold.of(calls.Opened)[0].reused_tokens == 0
    await three.bench.settled()


async def test_idle_prefixes_give_way(three: Three) -> None:
    prompts = [f"Number {number}: {PROMPTS[number % 3]} and then, of course, the" * 2 for number in range(12)]
    for number, prompt in enumerate(prompts):
        await three.bench.run([three.head, three.tail], prompt, max_tokens=2, prefix_key=f"k{number}")
    shard = three.head.stages.shards[0]
    assert shard.free_slots == 8
    assert len(three.head.stages.prefixes) <= 8


async def test_cancel_frees_every_stage(three: Three) -> None:
    request = three.bench.request([three.head.stage(), three.tail.stage()], PROMPTS[0], max_tokens=300)
    call = await three.head.heads.start(request)
    while not any(isinstance(event, calls.TokenEvent) for event in await call.events.take()):
        pass
    started = time.monotonic()
    await three.head.heads.cancel(call)
    await three.bench.settled(seconds=3.0)
    assert time.monotonic() - started < 3.0


async def test_a_slow_reader_holds_the_head_back(three: Three) -> None:
    request = three.bench.request([three.head.stage(), three.tail.stage()], PROMPTS[0], max_tokens=120)
    call = await three.head.heads.start(request)
    await asyncio.sleep(0.5)
    steps = -1
    while (now := three.head.stages.executor.load().steps) != steps:
        steps = now
        await asyncio.sleep(1.0)
    waiting = await call.events.take()
    assert len(waiting) <= 66
    answer = await three.bench.follow(call)
    tokens = sum(isinstance(event, calls.TokenEvent) for event in (*waiting, *answer.events))
    assert tokens == 120 or answer.end.by == "eos"
    await three.bench.settled()


async def test_two_stages_on_one_node(three: Three, bench: Bench) -> None:
    middle = await bench.add(10, 19)
    first = await bench.add(0, LAST, cuts=(20,))
    route = [first.stage(0, 9), middle.stage(10, 19), first.stage(20, LAST)]
    answer = await bench.run(route, PROMPTS[0])
    alone = await bench.run([three.whole], PROMPTS[0])
    assert answer.ids() == alone.ids()
    await bench.settled()


async def test_health_is_what_the_router_reads(three: Three) -> None:
    """Over gRPC and in the process, busy and idle."""
    request = three.bench.request([three.head.stage(), three.tail.stage()], PROMPTS[0], max_tokens=100)
    call = await three.head.heads.start(request)
    await call.events.take()
    health = three.head.stages.state.health()
    async with grpc.aio.insecure_channel(three.head.address) as channel:
        told = await DataPlaneStub(channel).Health(pb.HealthRequest())
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        probe = await DataPlaneStub(channel).Probe(pb.ProbeRequest(model="smollm2"))
        other = await DataPlaneStub(channel).Probe(pb.ProbeRequest(model="other"))
        echo = await DataPlaneStub(channel).Echo(pb.EchoMessage(payload=b"abc"))
    await three.head.heads.cancel(call)
    state = NodeState.from_dict(health)
    assert state.node_id == three.head.node_id == told.node_id
    assert [[r.first, r.last] for r in told.served_layers] == health["served_layers"] == [[0, 14]]
    assert health["current_load"] > 0
    assert health["latency_ms"] > 0
    assert health["capacity_score"] > 0
    assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING, "the bench never said it is ready"
    assert probe.ok
    assert probe.ms > 0
    assert not other.ok
    assert "other" in other.error
    assert echo.payload == b"abc"


async def test_half_precision_on_a_link(three: Three) -> None:
    three.head.stages._link_dtype = lambda _: "f16"
    try:
        answer = await three.bench.run([three.head, three.tail], PROMPTS[0], logprobs=0)
    finally:
        three.head.stages._link_dtype = lambda _: "f32"
    exact = await three.bench.run([three.head, three.tail], PROMPTS[0], logprobs=0)
    first, second = (a.of(calls.TokenEvent)[0].lp[0][1] for a in (answer, exact))
    assert first != second
    assert np.isclose(first, second, atol=0.3)
