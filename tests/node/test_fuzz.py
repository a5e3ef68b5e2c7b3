"""Any frames at all, in any order: the node answers in words or not at all, and serves its other calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node.bench import LAST, MESH, Bench, BenchNode

from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store
from meshnet.protocol import PROTOCOL_VERSION, calls
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.calls import RouteStage
from meshnet.protocol.dataplane_pb2_grpc import (
    DataPlaneServicer,
    DataPlaneStub,
    add_DataPlaneServicer_to_server,
)

T = TypeVar("T")
EMBD = 576
CALL = "call-fuzz"


class Running:
    """The mesh on a loop of its own: hypothesis drives from outside."""

    def __init__(self, model: ModelFile, store: Store) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.bench = Bench(model, store)
        self.head: BenchNode = self.run(self.bench.add(0, 14, n_ctx=256, n_slots=3))
        self.tail: BenchNode = self.run(self.bench.add(15, LAST, n_ctx=256, n_slots=3))
        stages = [self.head.stage(), self.tail.stage()]
        self.ticket = self.bench.ticket(CALL, 0, stages)
        self.expected = self.run(self.bench.run([self.head, self.tail], "Once", max_tokens=2)).ids()

        self.run(self._know_the_call(stages))
        self.liar = Liar()
        self.liar_stage: RouteStage = self.run(self._start_liar())

    async def _start_liar(self) -> RouteStage:
        self._server = grpc.aio.server()
        add_DataPlaneServicer_to_server(self.liar, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return RouteStage("liar", 15, LAST, f"127.0.0.1:{port}")

    async def _know_the_call(self, stages: list[RouteStage]) -> None:
        """The head answers for the call, so that the tail's sessions of it can be opened."""
        call = await self.head.heads.start(self.bench.request(stages, "x", call_id=CALL, max_tokens=1))
        await self.bench.follow(call)
        self.head.heads._calls[CALL] = (call, asyncio.create_task(asyncio.sleep(0)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        del self.head.heads._calls[CALL]
        self.run(self._server.stop(0))
        self.run(self.bench.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def running(smollm2: ModelFile, store: Store) -> Iterator[Running]:
    found = Running(smollm2, store)
    with pytest.MonkeyPatch.context() as patch:
        # A fork of what will never be computed is refused after two minutes: too long for many examples.
        patch.setattr("meshnet.node.stages.FORK_S", 0.2)
        yield found
    found.close()


sessions = st.sampled_from([f"{CALL}/0/0", f"{CALL}/0/1", f"{CALL}/1/0", "x/0/0", "", "a/b/c", "é" * 300])
numbers = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 255, 256, 257, 2**31, 2**32 - 1]))
data = st.one_of(
    st.binary(max_size=64),
    st.integers(0, 5).map(lambda rows: np.full((rows, EMBD), 0.01, dtype="<f4").tobytes()),
    st.sampled_from([np.nan, np.inf, 3e38]).map(lambda v: np.full((1, EMBD), v, dtype="<f4").tobytes()),
    st.integers(0, 3).map(lambda rows: np.full((rows, EMBD), 0.01, dtype="<f2").tobytes()),
)
words = st.sampled_from(["", "f32", "f16", "f64", "\N{SNOWMAN}"])
samplings = st.builds(
    pb.Sampling,
    temperature=st.floats(allow_nan=True),
    top_p=st.floats(allow_nan=True),
    top_k=numbers,
    seed=st.integers(0, 2**64 - 1),
    choice=numbers,
    repeat_penalty=st.floats(allow_nan=True),
    grammar=st.sampled_from(["", "root ::=", 'root ::= "a"', "\0", "root ::= " + "(" * 500]),
    logprobs=st.integers(-5, 30),
    prompt_tokens=numbers,
    logit_bias=st.lists(st.builds(pb.LogitBias, token=numbers, bias=st.floats(allow_nan=True)), max_size=2),
)
steps = st.builds(
    pb.Step,
    session=sessions,
    stage=st.integers(0, 2),
    position=numbers,
    rows=numbers,
    dtype=words,
    data=data,
    sample=numbers,
    tokens=st.lists(st.integers(-5, 100), max_size=3),
    prefill=st.booleans(),
    replay=st.booleans(),
    sequence=st.one_of(st.integers(0, 3), st.just(2**63)),
)
plain_steps = st.builds(
    lambda session, position, rows, sequence, prefill: pb.Step(
        session=session,
        stage=1,
        position=position,
        rows=rows,
        dtype="f32",
        data=np.full((rows, EMBD), 0.02, dtype="<f4").tobytes(),
        prefill=prefill,
        sequence=sequence,
        sample=1,
    ),
    st.one_of(st.just(f"{CALL}/0/0"), sessions),
    st.integers(0, 8),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
)
closes = st.builds(pb.Close, session=sessions, stage=st.integers(0, 2), keep_prefix=st.booleans())
results = st.builds(
    pb.Result,
    session=sessions,
    tokens=st.lists(
        st.builds(pb.Token, position=numbers, token=st.integers(-(2**31), 2**31 - 1)), max_size=2
    ),
)


answers = st.builds(
    pb.Opened,
    position=numbers,
    replay_rows=numbers,
    decode_ms=st.floats(allow_nan=True),
    row_ms=st.floats(allow_nan=True),
    node_id=words,
    error_code=st.sampled_from(["", "", "busy"]),
)
replies = st.builds(
    pb.Frame,
    opened=st.lists(st.builds(pb.Opened, session=sessions, stage=numbers, position=numbers), max_size=2),
    credits=st.lists(st.builds(pb.Credit, session=sessions, stage=numbers, upto=numbers), max_size=3),
    lost=st.lists(st.builds(pb.Lost, session=sessions, stage=numbers, node_id=words, code=words), max_size=1),
    results=st.lists(results, max_size=2),
    steps=st.lists(steps, max_size=1),
    progress=st.builds(pb.Progress, steps=st.integers(0, 2**63)),
    hello=st.builds(pb.Hello, node_id=words, protocol_version=st.integers(0, 2**31 - 1)),
)


class Liar(DataPlaneServicer):  # type: ignore[misc]
    """A tail that greets as it should, answers an open with anything at all, and hangs up."""

    def __init__(self) -> None:
        self.opened = pb.Opened()
        self.replies: list[pb.Frame] = []

    async def Exchange(self, _requests: Any, context: Any) -> None:
        await context.read()
        greeting = pb.Hello(node_id="liar", protocol_version=PROTOCOL_VERSION, mesh_id=MESH)
        await context.write(pb.Frame(hello=greeting))
        asked = (await context.read()).opens[0]
        answer = pb.Opened()
        answer.CopyFrom(self.opened)
        answer.session, answer.stage = asked.session, asked.stage
        await context.write(pb.Frame(opened=[answer]))
        for frame in self.replies:
            for about in frame.credits:
                about.session = about.session or asked.session
            for lost in frame.lost:
                lost.session = lost.session or asked.session
            await context.write(frame)


def good_open(running: Running, choice: int = 0) -> pb.Open:
    return pb.Open(
        session=f"{CALL}/0/{choice}",
        ticket=running.ticket,
        stage=1,
        fingerprint=running.bench.model.fingerprint,
        start_layer=15,
        end_layer=LAST,
        n_embd=EMBD,
        dtype="f32",
        max_positions=64,
        sampling=pb.Sampling(temperature=0.0, top_p=1.0, repeat_penalty=1.0, logprobs=-1, prompt_tokens=2),
        tokens=[1, 2],
    )


@st.composite
def opens(draw: st.DrawFn, running: Running) -> pb.Open:
    """Mostly one that would be taken, with a few things wrong."""
    message = good_open(running, draw(st.integers(0, 3)))
    for name in draw(
        st.lists(st.sampled_from(["session", "stage", "start_layer", "n_embd", "dtype"]), max_size=2)
    ):
        setattr(message, name, draw({"session": sessions, "dtype": words}.get(name, numbers)))
    for name in draw(st.lists(st.sampled_from(["max_positions", "credits", "reuse_position"]), max_size=2)):
        setattr(message, name, draw(numbers))
    if draw(st.booleans()):
        message.sampling.CopyFrom(draw(samplings))
    message.attach = draw(st.booleans())
    message.fork_of = draw(st.sampled_from(["", "", f"{CALL}/0/0", "x"]))
    message.fork_position = draw(st.integers(0, 3))
    message.tokens[:] = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
    return message


async def throw(running: Running, frames: list[pb.Frame]) -> None:
    """Sends everything, hears everything for a moment, and hangs up."""
    async with grpc.aio.insecure_channel(running.tail.address) as channel:
        call = DataPlaneStub(channel).Exchange()
        await call.write(
            pb.Frame(hello=pb.Hello(node_id="f", protocol_version=PROTOCOL_VERSION, mesh_id=MESH))
        )
        try:
            async with asyncio.timeout(10):
                for frame in [pb.Frame(opens=[good_open(running)]), *frames]:
                    await call.write(frame)
                    await hear(call, len(frame.opens))
                await call.write(pb.Frame(poll=True))
                await hear(call, 0, until_progress=True)
        finally:
            call.cancel()


async def hear(call: Any, opens: int, *, until_progress: bool = False) -> None:
    """Reads until every open is answered: each is, whatever it was."""
    while opens or until_progress:
        answer = await call.read()
        assert answer is not grpc.aio.EOF
        opens -= len(answer.opened)
        for lost in answer.lost:
            assert lost.code
            assert lost.message
        for opened in answer.opened:
            assert bool(opened.error_code) == bool(opened.error)
            assert opened.error_code != "internal"
        if answer.HasField("progress") and until_progress:
            return


async def still_serves(running: Running) -> None:
    tail, bench = running.tail, running.bench
    tail.stages.close_call(CALL)
    for session in list(tail.stages.sessions.values()):
        tail.stages.discard(session)
    answer = await bench.run([running.head, tail], "Once", max_tokens=2)
    assert answer.ids() == running.expected
    async with asyncio.timeout(10):
        while tail.held or tail.stages.sessions:
            await asyncio.sleep(0.01)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_frames_leave_the_node_serving(running: Running, data: st.DataObject) -> None:
    frame = st.builds(
        pb.Frame,
        opens=st.lists(opens(running), max_size=2),
        steps=st.lists(st.one_of(plain_steps, steps), max_size=4),
        closes=st.lists(closes, max_size=2),
        results=st.lists(results, max_size=1),
        poll=st.booleans(),
        credits=st.lists(st.builds(pb.Credit, session=sessions, upto=numbers), max_size=1),
        opened=st.lists(st.builds(pb.Opened, session=sessions, position=numbers), max_size=1),
        lost=st.lists(st.builds(pb.Lost, session=sessions), max_size=1),
        hello=st.one_of(st.none(), st.builds(pb.Hello, node_id=words)),
        progress=st.one_of(st.none(), st.builds(pb.Progress, steps=numbers)),
    )
    frames = data.draw(st.lists(frame, min_size=1, max_size=4))
    running.run(throw(running, frames))
    running.run(still_serves(running))


async def ask_the_liar(running: Running) -> None:
    """The call is told that its tail is lost, whatever that said before."""
    stages = [running.head.stage(), running.liar_stage]
    call = await running.head.heads.start(running.bench.request(stages, "Once", max_tokens=2))
    async with asyncio.timeout(10):
        while not any(isinstance(event, calls.LostNode) for event in await call.events.take()):
            pass
    await running.head.heads.cancel(call)
    async with asyncio.timeout(10):
        while running.head.held or running.head.stages.sessions:
            await asyncio.sleep(0.01)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(answers, st.lists(replies, max_size=3))
def test_whatever_a_tail_answers_its_head_goes_on(
    running: Running, opened: pb.Opened, replies: list[pb.Frame]
) -> None:
    running.liar.opened, running.liar.replies = opened, replies
    running.run(ask_the_liar(running))
    running.run(still_serves(running))
