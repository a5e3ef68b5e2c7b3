"""The small pure parts: pieces, rings, prefixes, deadlines, frames, events, limits, identities."""

from __future__ import annotations

import asyncio
import itertools
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.engine.base import EngineInfo, SelfTest
from meshnet.node.deadlines import (
    CEILING_S,
    Deadline,
    Owed,
    decode_deadline,
    judge,
    open_deadline,
    prefill_deadline,
)
from meshnet.node.events import EventQueue
from meshnet.node.feeding import generated_spans, plan, prompt_spans
from meshnet.node.frames import MAX_FRAME_BYTES, MAX_WAITING, Outbox, OutboxFull
from meshnet.node.health import Ewma, lane_costs, moved, step_ms
from meshnet.node.identity import Identity, IdentityError, Keeper
from meshnet.node.limits import cpu_quota, memory_limit, usable_cores
from meshnet.node.loader import LoadError, parse_layers
from meshnet.node.prefixes import LEAST_POSITIONS, Idle, Prefixes, common_prefix
from meshnet.node.ring import Kept, SentRing, merge
from meshnet.node.sessions import Refused, parse_session, session_id
from meshnet.protocol import calls
from meshnet.protocol import dataplane_pb2 as pb

# ---------------------------------------------------------------- pieces


def covered(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [position for first, end in spans for position in range(first, end)]


@given(st.integers(1, 900), st.integers(1, 300), st.booleans())
def test_a_prompt_is_cut_at_multiples_of_the_chunk(length: int, chunk: int, last_alone: bool) -> None:
    spans = prompt_spans((), 0, length, chunk, last_alone=last_alone)
    assert covered(spans) == list(range(length))
    borders = {first for first, _ in spans} - {0}
    assert all(border % chunk == 0 or (last_alone and border == length - 1) for border in borders)
    if last_alone:
        assert spans[-1] == (length - 1, length)


@given(st.data())
def test_a_reused_prefix_keeps_its_borders(data: st.DataObject) -> None:
    first = data.draw(st.integers(20, 300))
    kept = prompt_spans((), 0, first, 64, last_alone=False) + generated_spans(first, first + 30, 1)
    start = data.draw(st.integers(1, first + 30))
    reused = tuple((a, min(b, start)) for a, b in kept if a < start)
    spans = prompt_spans(reused, start, start + 100, 64, last_alone=False)
    assert covered(spans) == list(range(start + 100))
    assert spans[: len(reused)] == reused


@given(st.integers(1, 400), st.integers(0, 90), st.integers(1, 63), st.data())
def test_a_plan_feeds_everything_once(prompt: int, generated: int, rows: int, data: st.DataObject) -> None:
    known = prompt + generated
    position = data.draw(st.integers(0, known))
    spans = prompt_spans((), 0, prompt, 128, last_alone=False)
    pieces = plan(spans, prompt, known, position, rows, replay=True)
    fed = [p for piece in pieces for p in range(piece.start, piece.end)]
    assert fed == list(range(position, known))
    assert [piece.sample for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    borders = {first for first, _ in spans}
    assert all(p.start in borders or p.start >= prompt or p.start == position for p in pieces)
    assert all(piece.end - piece.start <= rows for piece in pieces if piece.start >= prompt)


# ---------------------------------------------------------------- what was sent


def kept(position: int, rows: int = 1, *, prefill: bool = False, sample: int = 1) -> Kept:
    hidden = np.arange(position, position + rows, dtype=np.float32).reshape(rows, 1).repeat(4, axis=1)
    return Kept(position, hidden, sample, prefill, tuple(range(position, position + rows)))


def test_a_ring_forgets_what_was_sent_longest_ago() -> None:
    ring = SentRing(limit=10 * 16)
    for position in range(6):
        ring.add(1, kept(position))
        ring.add(2, kept(position))
    assert ring.bytes <= 160
    assert not ring.covers(1, 0, 6)
    assert ring.covers(1, 2, 6)
    assert [each.position for each in ring.since(2, 3)] == [3, 4, 5]
    ring.drop(1)
    ring.drop(2)
    assert ring.bytes == 0


def test_a_ring_goes_back_with_its_session() -> None:
    ring = SentRing()
    ring.add(1, kept(0, 4, prefill=True))
    for position in range(4, 8):
        ring.add(1, kept(position))
    ring.add(1, kept(6, 2))
    assert [each.position for each in ring.since(1, 0)] == [0, 4, 5, 6]
    ring.truncate(1, 5)
    assert ring.covers(1, 0, 5)
    assert not ring.covers(1, 0, 6)
    assert not ring.covers(1, 2, 5), "a step that was sent whole is sent again whole"
    ring.add(1, kept(9))
    assert not ring.covers(1, 0, 5), "a gap ends what can be sent again"


def test_a_fork_shares_what_was_sent() -> None:
    ring = SentRing()
    ring.add(1, kept(0, 4, prefill=True))
    ring.add(1, kept(4))
    ring.share(1, 2, 4)
    ring.drop(1)
    assert ring.covers(2, 0, 4)
    assert not ring.covers(2, 0, 5)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30), st.integers(1, 6)), max_size=60),
    st.integers(1, 40),
)
def test_a_ring_counts_its_bytes(moves: list[tuple[int, int, int]], limit: int) -> None:
    ring = SentRing(limit=limit * 16)
    for session, position, rows in moves:
        ring.add(session, kept(position, rows))
        runs = [ring.since(number, 0) for number in (1, 2, 3)]
        assert ring.bytes == sum(each.hidden.nbytes for run in runs for each in run)
        assert ring.bytes <= ring.limit
        assert all(a.end == b.position for run in runs for a, b in itertools.pairwise(run))


@given(st.integers(1, 63), st.integers(0, 100))
def test_merged_steps_have_the_same_rows(rows: int, generated: int) -> None:
    steps = [kept(0, 100, prefill=True, sample=0), kept(100, 50, prefill=True)]
    steps += [kept(150 + n) for n in range(generated)]
    merged = merge(steps, rows)
    assert np.array_equal(
        np.concatenate([each.hidden for each in merged]), np.concatenate([each.hidden for each in steps])
    )
    assert [each.position for each in merged][:2] == [0, 100]
    assert all(each.rows <= rows for each in merged[2:])
    assert [each.sample for each in merged] == [0] * (len(merged) - 1) + [1]
    assert [token for each in merged for token in each.tokens] == list(range(150 + generated))


# ---------------------------------------------------------------- prefixes


def idle(slot: int, tokens: list[int], key: str = "a") -> Idle:
    return Idle(0, slot, 0, 9, key, np.asarray(tokens, dtype=np.int32))


def test_the_longest_prefix_of_the_same_account_is_taken() -> None:
    prefixes = Prefixes()
    base = list(range(40))
    prefixes.put(idle(1, base[:20]))
    prefixes.put(idle(2, base))
    prefixes.put(idle(3, [*base, 77, 78], key="b"))
    wanted = np.asarray([*base, 50, 51], dtype=np.int32)
    assert prefixes.take(0, 0, 8, "a", wanted, 99) is None, "other layers"
    assert prefixes.take(1, 0, 9, "a", wanted, 99) is None, "another shard"
    found = prefixes.take(0, 0, 9, "a", wanted, 99)
    assert found is not None
    assert (found[0].slot, found[1]) == (2, 40)
    found = prefixes.take(0, 0, 9, "a", wanted, 99)
    assert found is not None
    assert found[0].slot == 1
    assert prefixes.take(0, 0, 9, "a", wanted, 99) is None
    assert prefixes.count(0) == 1


def test_the_last_prompt_token_is_always_computed() -> None:
    prefixes = Prefixes()
    tokens = list(range(30))
    prefixes.put(idle(1, tokens))
    found = prefixes.take(0, 0, 9, "a", np.asarray(tokens, dtype=np.int32), len(tokens) - 1)
    assert found is not None
    assert found[1] == 29


def test_short_prefixes_are_not_worth_it_and_the_oldest_goes_first() -> None:
    prefixes = Prefixes()
    prefixes.put(idle(4, list(range(LEAST_POSITIONS))))
    prefixes.put(idle(5, list(range(100, 150))))
    different = np.asarray([*range(LEAST_POSITIONS - 1), 9999], dtype=np.int32)
    assert prefixes.take(0, 0, 9, "a", different, 99) is None
    gone = prefixes.evict(0)
    assert gone is not None
    assert gone.slot == 4
    assert [each.slot for each in prefixes.drop(0)] == [5]
    assert prefixes.evict(0) is None


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    length = common_prefix(np.asarray(a, dtype=np.int32), np.asarray(b, dtype=np.int32))
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


# ---------------------------------------------------------------- deadlines


def test_deadlines_follow_the_estimates_within_bounds() -> None:
    assert decode_deadline(1.0, 1.0).silent == 3.0
    assert decode_deadline(200.0, 0.0).silent == 4.0
    assert decode_deadline(5000.0, 5000.0).silent == CEILING_S
    assert decode_deadline(1.0, 1.0).stuck == CEILING_S
    assert prefill_deadline(256, 40.0).stuck == pytest.approx(4 * 256 * 0.040)
    assert open_deadline(3, 0.0).silent > open_deadline(1, 0.0).silent


def test_silence_stillness_and_patience() -> None:
    owed = Owed(since=100.0, deadline=Deadline(silent=3.0, stuck=10.0))
    assert judge(owed, 100.5, heard=0, progressed=0, polled=0) == "ok"
    assert judge(owed, 101.5, heard=0, progressed=0, polled=0) == "poll"
    assert judge(owed, 101.6, heard=0, progressed=0, polled=101.5) == "ok", "one question at a time"
    assert judge(owed, 103.1, heard=0, progressed=0, polled=101.5) == "silent"
    assert judge(owed, 109.0, heard=108.9, progressed=0, polled=108.5) == "ok", "it answers, so it lives"
    assert judge(owed, 110.1, heard=110.0, progressed=0, polled=110.0) == "stuck", "but it computes nothing"
    assert judge(owed, 111.0, heard=110.9, progressed=109.0, polled=110.0) == "ok"


# ---------------------------------------------------------------- frames and events


async def written(outbox: Outbox, count: int) -> list[pb.Frame]:
    frames: list[pb.Frame] = []
    done = asyncio.Event()

    async def write(frame: pb.Frame) -> None:
        frames.append(frame)
        if len(frames) == count:
            done.set()

    pump = asyncio.create_task(outbox.pump(write))
    async with asyncio.timeout(5):
        await done.wait()
    await asyncio.sleep(0.01)
    pump.cancel()
    return frames


async def test_what_is_queued_together_leaves_in_one_frame() -> None:
    outbox = Outbox()
    for n in range(5):
        outbox.put(pb.Step(session=str(n)))
    outbox.put(pb.Close(session="0"))
    outbox.poll()
    (frame,) = await written(outbox, 1)
    assert [step.session for step in frame.steps] == ["0", "1", "2", "3", "4"]
    assert [close.session for close in frame.closes] == ["0"]
    assert frame.poll


async def test_an_order_that_a_frame_cannot_show_takes_another_frame() -> None:
    outbox = Outbox()
    outbox.put(pb.Close(session="a"))
    outbox.put(pb.Open(session="b"))
    outbox.put(pb.Step(session="b"))
    first, second = await written(outbox, 2)
    assert [close.session for close in first.closes] == ["a"]
    assert [open_.session for open_ in second.opens] == ["b"]
    assert [step.session for step in second.steps] == ["b"]


async def test_large_steps_are_spread_over_frames() -> None:
    outbox = Outbox()
    for n in range(3):
        outbox.put(pb.Step(session=str(n), data=bytes(MAX_FRAME_BYTES // 2 + 1)))
    frames = await written(outbox, 3)
    assert [len(frame.steps) for frame in frames] == [1, 1, 1]


async def test_an_outbox_is_bounded() -> None:
    outbox = Outbox()
    for _ in range(MAX_WAITING):
        outbox.put(pb.Credit())
    with pytest.raises(OutboxFull):
        outbox.put(pb.Credit())


async def test_events_say_when_there_is_room() -> None:
    events = EventQueue(limit=3)
    told: list[bool] = []
    events.room = lambda: told.append(events.full)
    for n in range(3):
        events.put(calls.Prefill(n, 9))
    assert events.full
    assert len(await events.take()) == 3
    assert told == [False]
    events.put(calls.Prefill(5, 9))
    assert len(await events.take()) == 1
    assert told == [False]
    events.end()
    assert await events.take() == []


# ---------------------------------------------------------------- names and layers


@given(st.text(min_size=1, max_size=40).filter(lambda t: "/" not in t), st.integers(0, 99), st.integers(0, 9))
def test_session_ids_are_read_back(call: str, epoch: int, choice: int) -> None:
    assert parse_session(session_id(call, epoch, choice)) == (call, epoch, choice)


@given(st.text(max_size=30))
def test_other_session_ids_are_refused_or_read(text: str) -> None:
    try:
        call, epoch, choice = parse_session(text)
    except Refused:
        return
    else:
        assert call
        assert min(epoch, choice) >= 0


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("0-14", [(0, 14)]),
        ("7", [(7, 7)]),
        ("0-9, 20-29", [(0, 9), (20, 29)]),
        ("10-19,0-9", [(0, 19)]),
        ("0-9,5-14", [(0, 14)]),
    ],
)
def test_layers_are_read(text: str, ranges: list[tuple[int, int]]) -> None:
    assert parse_layers(text, 30) == ranges


@pytest.mark.parametrize("text", ["", "a-b", "3-", "-3", "5-2", "0-30", "1-2-3", "0-9,,"])
def test_layers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="--layers"):
        parse_layers(text, 30)


# ---------------------------------------------------------------- limits and identity


def test_control_groups_bound_the_cores(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("nonsense\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_control_groups_bound_the_memory(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory_limit(tmp_path) == 1_000_000


def test_an_identity_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    key = keeper.identity.key
    node_id = keeper.identity.node_id
    keeper.keep(Identity(node_id, "mesh", "secret", key=key))
    assert stat.S_IMODE((tmp_path / "node.json").stat().st_mode) == 0o600
    with pytest.raises(IdentityError, match="another node"):
        Keeper(tmp_path)
    keeper.close()
    again = Keeper(tmp_path)
    assert again.identity == Identity(node_id, "mesh", "secret", key=key)
    again.close()


def test_a_damaged_identity_is_named(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text("{")
    with pytest.raises(IdentityError, match=r"node\.json"):
        Keeper(tmp_path)


# ---------------------------------------------------------------- figures

INFO = EngineInfo("m", "f", "llama", 0, 9, 10, 64, 100, 512, 4, 256, (0,), False, "n", 1, "cpu", 0)
TEST = SelfTest(1.0, 0.1, 0.5, 2.0, {1: 12.5, 4: 25.0})


def test_a_lane_costs_its_part_of_the_shard() -> None:
    assert step_ms(INFO, TEST, 0, 9) == 12.5
    assert step_ms(INFO, TEST, 0, 4) == 5.5
    costs = lane_costs(INFO, TEST, 0, 4)
    assert costs.decode_ms(1) == pytest.approx(5.5)
    assert costs.decode_ms(4) == pytest.approx(11.0)
    assert costs.row_ms == pytest.approx(0.5)


def test_live_times_move_a_self_test_within_bounds() -> None:
    assert moved(TEST, 0.5, 0.5) == TEST
    assert moved(TEST, 9.0, 9.0).decode_ms_per_layer == 1.5
    assert moved(TEST, 1.2, 1.0).output_ms == pytest.approx(2.4)


def test_an_ewma_moves_by_a_fifth() -> None:
    mean = Ewma().after(10.0)
    assert mean.value == 10.0
    assert mean.after(20.0).value == pytest.approx(12.0)
