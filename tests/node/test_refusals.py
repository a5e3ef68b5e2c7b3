"""What a peer can do wrong on the data plane: each is refused in words, and the node serves its others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from node.bench import LAST, MESH, Bench, BenchNode

from meshnet.node.call import MAX_NOTICES
from meshnet.node.frames import MAX_MESSAGE_BYTES
from meshnet.protocol import PROTOCOL_VERSION, calls
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.dataplane_pb2_grpc import DataPlaneStub
from meshnet.protocol.errors import ApiError

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMBD = 576
PROMPT = "A refusal is"


@dataclass
class Pair:
    bench: Bench
    head: BenchNode
    tail: BenchNode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(bench: Bench) -> AsyncIterator[Pair]:
    yield Pair(bench, await bench.add(0, 14, n_ctx=256), await bench.add(15, LAST, n_ctx=256))


class Peer:
    """Another node's side of a stream, by hand."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.Frame(**fields))

    async def frame(self) -> pb.Frame:
        async with asyncio.timeout(10):
            found = await self.call.read()
        assert isinstance(found, pb.Frame), "the stream ended"
        return found

    async def opened(self, message: pb.Open) -> pb.Opened:
        await self.send(opens=[message])
        while True:
            frame = await self.frame()
            if frame.opened:
                return frame.opened[0]

    async def lost(self) -> pb.Lost:
        while True:
            frame = await self.frame()
            if frame.lost:
                return frame.lost[0]


def hello(node_id: str = "tester", **changes: Any) -> pb.Hello:
    values = {"node_id": node_id, "protocol_version": PROTOCOL_VERSION, "mesh_id": MESH, **changes}
    return pb.Hello(**values)


@asynccontextmanager
async def stream(node: BenchNode, greeting: pb.Hello | None = None) -> AsyncIterator[Peer]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(node.address, options=options) as channel:
        peer = Peer(DataPlaneStub(channel).Exchange())
        await peer.send(hello=greeting or hello())
        assert (await peer.frame()).hello.node_id == node.node_id
        yield peer
        peer.call.cancel()


async def to_the_end(call: Any) -> None:
    async with asyncio.timeout(10):
        while await call.read() is not grpc.aio.EOF:
            pass


def opening(pair: Pair, call_id: str = "call-x", **changes: Any) -> pb.Open:
    """An open that the tail takes: its route's head is the tester, at the real head's address."""
    stages = [pair.head.stage(), pair.tail.stage()]
    values: dict[str, Any] = {
        "session": f"{call_id}/0/0",
        "ticket": pair.bench.ticket(call_id, 0, stages),
        "stage": 1,
        "fingerprint": pair.bench.model.fingerprint,
        "start_layer": 15,
        "end_layer": LAST,
        "n_embd": EMBD,
        "dtype": "f32",
        "max_positions": 64,
        "sampling": pb.Sampling(temperature=0.0, logprobs=-1, repeat_penalty=1.0, top_p=1.0, prompt_tokens=4),
        "tokens": [1, 2, 3, 4],
        "credits": 4,
        **changes,
    }
    return pb.Open(**values)


def step(session: str, **changes: Any) -> pb.Step:
    rows = changes.get("rows", 4)
    values: dict[str, Any] = {
        "session": session,
        "stage": 1,
        "position": 0,
        "rows": rows,
        "dtype": "f32",
        "data": np.full((rows, EMBD), 0.01, dtype="<f4").tobytes(),
        "sample": 0,
        "prefill": True,
        "sequence": 0,
        **changes,
    }
    return pb.Step(**values)


async def works(pair: Pair) -> None:
    """The node serves others, whatever was done to it."""
    answer = await pair.bench.run([pair.head, pair.tail], PROMPT, max_tokens=3)
    assert len(answer.ids()) == 3
    await pair.bench.settled(seconds=10.0)


@asynccontextmanager
async def session(pair: Pair, call_id: str, **changes: Any) -> AsyncIterator[tuple[Peer, str]]:
    """A session on the tail, opened by hand; the real head runs a call of that id, for its results."""
    head_call = await pair.head.heads.start(
        pair.bench.request([pair.head.stage(0, 14), pair.tail.stage()], "x", call_id=call_id, max_tokens=1)
    )
    await pair.bench.follow(head_call)
    # The close of that call's own session is still on its way when the answer is complete.
    async with asyncio.timeout(10):
        while any(name.startswith(f"{call_id}/") for name, _ in pair.tail.stages.sessions):
            await asyncio.sleep(0.01)
    # The head answers for the call while it is known there.
    pair.head.heads._calls[call_id] = (head_call, asyncio.create_task(asyncio.sleep(0)))
    try:
        async with stream(pair.tail) as peer:
            opened = await peer.opened(opening(pair, call_id, **changes))
            assert not opened.error_code, opened.error
            yield peer, f"{call_id}/0/0"
    finally:
        del pair.head.heads._calls[call_id]
        pair.tail.stages.close_call(call_id)


# ---------------------------------------------------------------- greetings


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"mesh_id": "another"}, "mesh"), ({"protocol_version": 99}, "version"), ({"mesh_id": ""}, "mesh")],
)
async def test_strangers_are_not_greeted(pair: Pair, changes: dict[str, Any], word: str) -> None:
    with pytest.raises((grpc.aio.AioRpcError, AssertionError)) as refused:
        async with stream(pair.tail, hello(**changes)):
            pass
    if isinstance(refused.value, grpc.aio.AioRpcError):
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert word in str(refused.value.details())
    await works(pair)


async def test_a_stream_begins_with_a_hello(pair: Pair) -> None:
    async with grpc.aio.insecure_channel(pair.tail.address) as channel:
        call = DataPlaneStub(channel).Exchange()
        await call.write(pb.Frame(poll=True))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await to_the_end(call)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION


# ---------------------------------------------------------------- opens


def signed_by_another(pair: Pair) -> str:
    other = Bench(pair.bench.model, pair.bench.store)
    other.key = Ed25519PrivateKey.generate()
    return other.ticket("call-x", 0, [pair.head.stage(), pair.tail.stage()])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ticket": ""}, "ticket"),
        ({"ticket": "e30.AAAA"}, "ticket"),
        ({"ticket": "x" * 100_000}, "ticket"),
        ({"session": "call-y/0/0"}, "ticket"),
        ({"session": "call-x/1/0"}, "ticket"),
        ({"session": "nonsense"}, "bad_session"),
        ({"session": "call-x/-1/0"}, "bad_session"),
        ({"stage": 0}, "route"),
        ({"stage": 7}, "route"),
        ({"start_layer": 14}, "route"),
        ({"end_layer": 28}, "route"),
        ({"fingerprint": "00" * 32}, "fingerprint"),
        ({"n_embd": 100}, "shape"),
        ({"dtype": "i8"}, "dtype"),
        ({"max_positions": 257}, "context"),
        ({"max_positions": 0}, "context"),
        ({"tokens": [1] * 65}, "context"),
        ({"fork_of": "call-z/0/0", "fork_position": 1}, "fork"),
        ({"sampling": pb.Sampling(temperature=-1.0, top_p=1.0, repeat_penalty=1.0)}, "engine"),
        ({"sampling": pb.Sampling(grammar="root ::= (", top_p=1.0, repeat_penalty=1.0)}, "grammar"),
    ],
)
async def test_an_open_that_does_not_fit_is_refused(pair: Pair, changes: dict[str, Any], code: str) -> None:
    async with stream(pair.tail) as peer:
        opened = await peer.opened(opening(pair, **changes))
    assert opened.error_code == code, opened.error
    assert opened.error
    assert pair.tail.held == 0
    await works(pair)


async def test_tickets_of_others_are_refused(pair: Pair) -> None:
    stages = [pair.head.stage(), pair.tail.stage()]
    expired = pair.bench.ticket("call-x", 0, stages, expires_ms=int(time.time() * 1000) - 1)
    elsewhere = pair.bench.ticket("call-x", 0, stages, mesh_id="another")
    async with stream(pair.tail) as peer:
        for ticket in (signed_by_another(pair), expired, elsewhere):
            opened = await peer.opened(opening(pair, ticket=ticket))
            assert opened.error_code == "ticket"
        unknown = pair.bench.ticket("call-x", 0, stages, fingerprint="ab" * 32)
        opened = await peer.opened(opening(pair, ticket=unknown, fingerprint="ab" * 32))
        assert opened.error_code == "fingerprint"
        short = pair.bench.ticket("call-x", 0, [pair.head.stage(), pair.tail.stage(15, 20)])
        opened = await peer.opened(opening(pair, ticket=short, end_layer=20))
        assert opened.error_code == "route"
        middle = pair.bench.ticket("call-x", 0, [pair.head.stage(0, 15), pair.tail.stage(16, LAST)])
        opened = await peer.opened(opening(pair, ticket=middle, start_layer=16))
        assert opened.error_code == "layers"
        assert "15" in opened.error
    await works(pair)


async def test_no_more_sessions_than_slots(pair: Pair) -> None:
    requests = [
        pair.bench.request([pair.head.stage(), pair.tail.stage()], PROMPT, max_tokens=200) for _ in range(5)
    ]
    running = [await pair.head.heads.start(request) for request in requests]
    answers = [asyncio.create_task(pair.bench.follow(call)) for call in running]
    deadline = time.monotonic() + 20
    while pair.tail.held < 4:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert pair.tail.held == 4
    for call in running:
        await pair.head.heads.cancel(call)
    said = [answer.of(calls.LostNode) for answer in await asyncio.gather(*answers)]
    refused = [events[0] for events in said if events]
    assert len(refused) == 1
    assert refused[0].code == "busy"
    assert "4 slots" in refused[0].message
    await works(pair)


async def test_an_engine_with_a_long_queue_opens_and_probes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshnet.node.executor.MAX_INBOX", 3)
    going_on = threading.Event()
    for _ in range(5):
        pair.tail.stages.executor.post(going_on.wait)
    async with stream(pair.tail) as peer:
        assert (await peer.opened(opening(pair))).error_code == "busy"
    async with grpc.aio.insecure_channel(pair.tail.address) as channel:
        probed = await DataPlaneStub(channel).Probe(pb.ProbeRequest(), timeout=10)
        assert not probed.ok
        assert "waits" in probed.error
    going_on.set()
    await works(pair)


async def test_a_flood_of_bad_tokens_is_one_loss(pair: Pair) -> None:
    request = pair.bench.request([pair.head.stage(), pair.tail.stage()], PROMPT, max_tokens=200)
    call = await pair.head.heads.start(request)
    got: list[calls.AnyEvent] = []
    while not any(isinstance(event, calls.TokenEvent) for event in got):
        got.extend(await call.events.take())
    bad = [pb.Token(position=position, token=-1) for position in range(256)]
    for _ in range(3 * MAX_NOTICES):
        call.take_result(f"{call.call_id}/0/0", bad, [])
    again = pair.bench.ticket(call.call_id, 1, [pair.head.stage(), pair.tail.stage()])
    with pytest.raises(ApiError) as refused:
        pair.head.heads.reroute(call.call_id, calls.Reroute(1, again, ()))
    assert refused.value.status == 503
    while not any(isinstance(event, calls.LostNode) for event in got):
        got.extend(await call.events.take())
    assert len([event for event in got if isinstance(event, calls.LostNode)]) == 1
    await pair.head.heads.cancel(call)
    await works(pair)


async def test_a_token_that_is_told_again_answers_no_step(pair: Pair) -> None:
    """Else more steps would go down than there is room for: after a loss, the old tail's come late."""
    request = pair.bench.request([pair.head.stage(), pair.tail.stage()], PROMPT, max_tokens=200)
    call = await pair.head.heads.start(request)
    following = asyncio.create_task(pair.bench.follow(call))
    async with asyncio.timeout(10):
        while True:
            session = call._choices[0].session
            outlet = session.outlet if session is not None else None
            if session is not None and outlet is not None and outlet.sampled > outlet.answered:
                break
            await asyncio.sleep(0)
    before, told = outlet.answered, [pb.Token(position=1, token=1)]
    call.take_result(session.id, told, [])
    late = [pb.Token(position=outlet.asked[0][1], token=10)]
    call.take_result(f"{call.call_id}/7/0", late, [])
    assert outlet.answered == before
    await pair.head.heads.cancel(call)
    await following
    await works(pair)


async def test_a_draining_node_takes_no_new_calls(pair: Pair) -> None:
    pair.tail.stages.draining = True
    try:
        async with stream(pair.tail) as peer:
            assert (await peer.opened(opening(pair))).error_code == "draining"
    finally:
        pair.tail.stages.draining = False
    await works(pair)


# ---------------------------------------------------------------- steps


def nan_rows() -> bytes:
    rows = np.full((4, EMBD), 0.01, dtype="<f4")
    rows[2, 5] = np.nan
    return rows.tobytes()


BAD_STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("rows that are not there", {"rows": 5, "data": b"\0" * 4 * EMBD * 4}, "bad_step"),
    ("no data", {"data": b""}, "bad_step"),
    ("half a row", {"data": b"\0" * 100}, "bad_step"),
    ("no rows", {"rows": 0, "data": b""}, "bad_step"),
    ("too many rows", {"rows": 257}, "bad_step"),
    ("more than the session's positions", {"rows": 65}, "bad_step"),
    ("a position ahead", {"position": 1}, "bad_step"),
    ("a sequence ahead", {"sequence": 1}, "bad_step"),
    ("another dtype", {"dtype": "f16"}, "bad_step"),
    ("an unknown dtype", {"dtype": "i8"}, "bad_step"),
    ("more samples than rows", {"sample": 5}, "bad_step"),
    ("tokens that do not match", {"tokens": [1, 2]}, "bad_step"),
    ("NaN", {"data": nan_rows()}, "engine"),
    ("infinity", {"data": np.full((4, EMBD), np.inf, dtype="<f4").tobytes()}, "engine"),
    ("64 rows in a decode step", {"rows": 64, "prefill": False}, "bad_step"),
]


@pytest.mark.parametrize(
    ("changes", "code"), [(c, code) for _, c, code in BAD_STEPS], ids=[n for n, _, _ in BAD_STEPS]
)
async def test_a_step_that_cannot_be_is_refused(pair: Pair, changes: dict[str, Any], code: str) -> None:
    async with session(pair, f"call-{'-'.join(changes)}") as (peer, name):
        await peer.send(steps=[step(name, **changes)])
        lost = await peer.lost()
        assert (lost.session, lost.code, lost.node_id) == (name, code, pair.tail.node_id)
        assert lost.message
        await peer.send(steps=[step(name)])
        assert (await peer.lost()).code == "closed", "the session is gone, the stream is not"
    await works(pair)


async def test_nan_in_one_session_leaves_the_others_of_the_batch_alone(pair: Pair) -> None:
    async with session(pair, "call-good") as (peer, good):
        other = opening(pair, "call-good", session="call-good/0/1")
        assert not (await peer.opened(other)).error_code
        bad = step("call-good/0/1", data=nan_rows())
        await peer.send(steps=[bad, step(good)])
        lost, credited = None, None
        while lost is None or credited is None:
            frame = await peer.frame()
            lost = next(iter(frame.lost), lost)
            credited = next(iter(frame.credits), credited)
        assert (lost.session, lost.code) == ("call-good/0/1", "engine")
        assert (credited.session, credited.upto) == (good, 1)
    await works(pair)


async def test_unknown_sessions_and_those_of_other_streams(pair: Pair) -> None:
    async with session(pair, "call-mine") as (peer, name), stream(pair.tail) as thief:
        await thief.send(steps=[step(name), step("call-none/0/0")])
        codes = {(await thief.lost()).code}
        assert codes == {"closed"}
        await thief.send(closes=[pb.Close(session=name, stage=1)])
        await peer.send(steps=[step(name)])
        frame = await peer.frame()
        assert frame.credits[0].upto == 1
    await works(pair)


async def test_a_repeated_step_changes_nothing(pair: Pair) -> None:
    async with session(pair, "call-again") as (peer, name):
        await peer.send(steps=[step(name)])
        assert (await peer.frame()).credits[0].upto == 1
        await peer.send(steps=[step(name)])
        await peer.send(steps=[step(name, position=4, sequence=1)])
        assert (await peer.frame()).credits[0].upto == 2
        (found,) = (s for s in pair.tail.stages.sessions.values() if s.id == name)
        assert found.computed == 8
    await works(pair)


async def test_a_step_back_is_a_rollback(pair: Pair) -> None:
    async with session(pair, "call-back") as (peer, name):
        await peer.send(steps=[step(name)])
        assert (await peer.frame()).credits[0].upto == 1
        await peer.send(steps=[step(name, position=2, sequence=1, rows=1)])
        assert (await peer.frame()).credits[0].upto == 2
        (found,) = (s for s in pair.tail.stages.sessions.values() if s.id == name)
        assert found.computed == 3
    await works(pair)


async def test_more_steps_than_credits(pair: Pair) -> None:
    async with session(pair, "call-flood") as (peer, name):
        await peer.send(steps=[step(name, position=4 * n, sequence=n) for n in range(14)])
        assert (await peer.lost()).code == "bad_step"
    await works(pair)


async def test_a_poll_is_answered_with_progress(pair: Pair) -> None:
    async with session(pair, "call-poll") as (peer, name):
        await peer.send(steps=[step(name, sample=1)])
        steps = -1
        deadline = time.monotonic() + 10
        upto = 0
        while not upto:
            assert time.monotonic() < deadline
            await peer.send(poll=True)
            frame = await peer.frame()
            if frame.HasField("progress"):
                assert frame.progress.steps >= steps
                steps = frame.progress.steps
            upto = frame.credits[0].upto if frame.credits else 0
        assert upto == 1
        assert steps > 0


# ---------------------------------------------------------------- bytes


async def test_garbage_ends_one_stream_and_no_more(pair: Pair) -> None:
    for data in (b"\xff" * 1000, b"\x0a\xff\xff\xff\xff\x7f", bytes(range(256)) * 10):
        async with grpc.aio.insecure_channel(pair.tail.address) as channel:
            call: Any = channel.stream_stream("/meshnet.dataplane.DataPlane/Exchange")()
            await call.write(data)
            with pytest.raises(grpc.aio.AioRpcError):
                await to_the_end(call)
    await works(pair)


async def test_a_huge_message_is_refused(pair: Pair) -> None:
    async with stream(pair.tail) as peer:
        await peer.send(steps=[step("call-x/0/0", data=bytes(MAX_MESSAGE_BYTES + 1))])
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await to_the_end(peer.call)
    await works(pair)


async def test_results_are_taken_from_the_tail_alone(pair: Pair) -> None:
    request = pair.bench.request([pair.head.stage(), pair.tail.stage()], PROMPT, max_tokens=30)
    expected = (await pair.bench.run([pair.head, pair.tail], PROMPT, max_tokens=30)).ids()
    call = await pair.head.heads.start(request)
    name = f"{call.call_id}/0/0"
    async with stream(pair.head, hello("impostor")) as peer:
        opened = await peer.opened(pb.Open(session=name, stage=2, ticket=request.ticket))
        assert opened.error_code == "route"
        forged = [pb.Token(position=position, token=1) for position in range(3, 40)]
        await peer.send(results=[pb.Result(session=name, tokens=forged)])
        answer = await pair.bench.follow(call)
    assert answer.ids() == expected
    await works(pair)


async def test_a_token_outside_the_vocabulary_is_the_tails_fault(pair: Pair) -> None:
    request = pair.bench.request([pair.head.stage(), pair.tail.stage()], PROMPT, max_tokens=200)
    call = await pair.head.heads.start(request)
    got: list[calls.AnyEvent] = []
    while not any(isinstance(event, calls.TokenEvent) for event in got):
        got.extend(await call.events.take())
    count = sum(len(e.ids) for e in got if isinstance(e, calls.TokenEvent))
    prompt = next(e.prompt_tokens for e in got if isinstance(e, calls.Opened))
    forged = [pb.Token(position=prompt + n, token=1_000_000) for n in range(count, count + 100)]
    call.take_result(f"{call.call_id}/0/0", forged, [])
    while not any(isinstance(event, calls.LostNode) for event in got):
        got.extend(await call.events.take())
    (lost,) = (event for event in got if isinstance(event, calls.LostNode))
    assert lost.node_id == pair.tail.node_id
    assert "vocabulary" in lost.message
    await pair.head.heads.cancel(call)
    await works(pair)


# ---------------------------------------------------------------- over HTTP's head


async def test_calls_without_a_valid_ticket_are_refused(pair: Pair) -> None:
    good = pair.bench.request([pair.head.stage(), pair.tail.stage()], PROMPT)
    cases = [
        ({"ticket": ""}, 401),
        ({"ticket": signed_by_another(pair)}, 401),
        ({"call_id": "call-other"}, 403),
        ({"ticket": pair.bench.ticket(good.call_id, 0, [pair.tail.stage(), pair.head.stage()])}, 403),
        ({"ticket": pair.bench.ticket(good.call_id, 0, [pair.head.stage(3, 14), pair.tail.stage()])}, 503),
    ]
    for changes, status in cases:
        values = {name: getattr(good, name) for name in good.__struct_fields__}
        with pytest.raises(ApiError) as refused:
            await pair.head.heads.start(calls.GenerateCall(**{**values, **changes}))
        assert refused.value.status == status
    await works(pair)
