"""The registry as a pure machine: what a single test over sockets cannot reach."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.tracker.catalogue import build_models, gaps
from meshnet.tracker.members import Card, Hardware, LinkView, Shard, Times
from meshnet.tracker.registry import step, unique_name
from meshnet.tracker.roster import Roster
from meshnet.tracker.signals import (
    Beat,
    CloseStream,
    Dial,
    Dialled,
    Effect,
    Event,
    Gone,
    Joined,
    LinksMeasured,
    Probe,
    Probed,
    Refuse,
    Rules,
    Say,
    ShardsChanged,
    State,
    StreamEnded,
    TellCuts,
    TellNotice,
    TellPeers,
    TellServing,
    Tick,
    Welcome,
)


def shard(first: int = 0, last: int = 9, **changes: object) -> Shard:
    base = Shard(
        model="m",
        fingerprint="f",
        arch="llama",
        start_layer=first,
        end_layer=last,
        model_layers=10,
        entry_layers=(first,),
        mid_shard_entry=False,
        n_slots=4,
        n_ctx=100,
        n_embd=8,
        times=Times(1, 0.1),
        capacity_score=1.0,
        state="ready",
        progress=1.0,
        error="",
        numerics_class="n",
        recurrent=False,
        card=None,
        memory_bytes=1,
        free_slots=4,
        free_kv_tokens=400,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def joined(node: str, connection: int, *shards: Shard, boot: int = 1, name: str = "") -> Joined:
    return Joined(
        connection=connection,
        now_ms=0,
        node_id=node,
        name=name or node,
        boot_id=boot,
        http_url=f"http://{node}",
        grpc_address=f"{node}:1",
        hardware=Hardware(),
        shards=shards or (shard(),),
        numerics_class="n",
        memory_limit_bytes=0,
        memory_free_bytes=0,
        meshnet_version="1",
        engine_version="e",
    )


def beat(node: str, connection: int, **changes: int) -> Beat:
    values = {"progress": 0, "waiting_steps": 0, "oldest_step_ms": 0.0, **changes}
    return Beat(
        connection=connection,
        node_id=node,
        now_ms=0,
        latency_ms=1.0,
        current_load=0.0,
        shards=(),
        served_requests=0,
        failed_requests=0,
        memory_free_bytes=0,
        **values,  # type: ignore[arg-type]
    )


def play(*events: tuple[Event, float], rules: Rules | None = None) -> tuple[State, list[Effect]]:
    state = State(rules or Rules())
    all_effects: list[Effect] = []
    for event, now in events:
        state, effects = step(state, event, now)
        all_effects += effects
    return state, all_effects


def test_a_join_is_welcomed_and_probed() -> None:
    state, effects = play((joined("a", 1), 0.0))
    assert Welcome(1, "a", "a") in effects
    assert Probe("a", 1, "a:1", "m") in effects
    assert state.nodes["a"].status(0.0) == "loading"
    state, later = step(state, Probed("a", 1, "m", ""), 0.1)
    assert state.nodes["a"].status(0.1) == "ready"
    assert TellServing(1, "m") in later
    assert any(isinstance(effect, Say) and effect.event == "node ready" for effect in later)


def test_a_probe_of_an_earlier_process_proves_nothing() -> None:
    state, _ = play((joined("a", 1), 0.0), (StreamEnded(1, "a", "gone"), 1.0), (joined("a", 2, boot=2), 2.0))
    after, _ = step(state, Probed("a", 1, "m", ""), 2.1)
    assert after.nodes["a"].status(2.1) == "loading"


def test_a_head_that_loads_again_keeps_its_models_names() -> None:
    """Else clients that use an alias would be told that there is no such model."""
    named = shard(card=Card(name="M", aliases=("short",)))
    loading = shard(state="loading", card=None)
    state, _ = play(
        (joined("a", 1, named), 0.0),
        (StreamEnded(1, "a", "gone"), 1.0),
        (joined("a", 2, loading, boot=2), 2.0),
    )
    card = state.nodes["a"].shards[0].card
    assert card is not None
    assert card.aliases == ("short",)
    other = shard(state="loading", card=None, fingerprint="another")
    state, _ = step(state, ShardsChanged(2, "a", (other,)), 3.0)
    assert state.nodes["a"].shards[0].card is None


def test_probes_are_tried_again_after_growing_pauses() -> None:
    state, _ = play((joined("a", 1), 0.0))
    now, pauses = 0.0, []
    for _ in range(5):
        state, _ = step(state, Probed("a", 1, "m", "no"), now)
        begun = now
        while True:
            now += 0.5
            state, _ = step(state, beat("a", 1), now)
            if state.nodes["a"].probe.running:
                break
        pauses.append(now - begun)
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]


def test_a_newer_stream_of_the_same_process_replaces_the_older_one() -> None:
    state, _ = play((joined("a", 1), 0.0), (Probed("a", 1, "m", ""), 0.1))
    state, effects = step(state, joined("a", 2), 0.2)
    assert CloseStream(1) in effects
    assert not any(isinstance(effect, Gone) for effect in effects)
    assert state.nodes["a"].status(0.2) == "ready"
    after, effects = step(state, StreamEnded(1, "a", "old stream"), 0.3)
    assert (after, effects) == (state, ())


def test_a_new_process_takes_over_an_id_only_when_the_old_one_is_silent() -> None:
    state, _ = play((joined("a", 1), 0.0))
    _, effects = step(state, joined("a", 2, boot=2), 1.0)
    assert isinstance(effects[0], Refuse)
    assert effects[0].retry
    _, effects = step(state, joined("a", 2, boot=2), 5.0)
    assert Gone("a", "it was started anew") in effects
    assert any(isinstance(effect, Welcome) for effect in effects)


def test_a_changed_load_must_be_proven_anew_and_an_unchanged_one_not() -> None:
    state, _ = play((joined("a", 1), 0.0), (Probed("a", 1, "m", ""), 0.1))
    same, _ = step(state, ShardsChanged(1, "a", (shard(),)), 0.2)
    assert same.nodes["a"].shards[0].probed
    changed, effects = step(state, ShardsChanged(1, "a", (shard(entry_layers=(0, 5)),)), 0.2)
    assert not changed.nodes["a"].shards[0].probed
    assert any(isinstance(effect, Probe) for effect in effects)


def test_a_report_of_another_fingerprint_ends_the_stream() -> None:
    state, _ = play((joined("a", 1), 0.0), (joined("b", 2), 0.0))
    state, effects = step(state, ShardsChanged(2, "b", (shard(fingerprint="g"),)), 1.0)
    assert any(isinstance(effect, Refuse) and effect.code == "fingerprint" for effect in effects)
    assert state.nodes["b"].status(1.0) == "lost"
    assert state.nodes["b"].losses == ()


def test_a_file_may_be_replaced_once_its_old_holders_are_gone() -> None:
    state, _ = play((joined("a", 1), 0.0), (StreamEnded(1, "a", "gone"), 1.0))
    state, effects = step(state, joined("b", 2, shard(fingerprint="g")), 2.0)
    assert any(isinstance(effect, Welcome) for effect in effects)
    assert build_models(state.nodes.values(), 2.0)["m"].fingerprint == "g"


def test_cuts_are_the_borders_inside_a_shard_and_told_once() -> None:
    state, effects = play((joined("full", 1), 0.0), (joined("head", 2, shard(0, 3)), 0.0))
    assert [effect for effect in effects if isinstance(effect, TellCuts)] == [TellCuts(1, "m", (4,))]
    state, later = step(state, joined("tail", 3, shard(7, 9)), 0.0)
    assert [effect for effect in later if isinstance(effect, TellCuts)] == [TellCuts(1, "m", (4, 7))]
    state, later = step(state, ShardsChanged(1, "full", (shard(entry_layers=(0, 4, 7)),)), 0.0)
    assert not any(isinstance(effect, TellCuts) for effect in later)


def test_peers_are_told_to_those_who_share_a_model_and_only_on_change() -> None:
    state, effects = play((joined("a", 1, shard(0, 4)), 0.0), (joined("b", 2, shard(5, 9)), 0.0))
    assert TellPeers(1, (("b", "b:1"),)) in effects
    assert TellPeers(2, (("a", "a:1"),)) in effects
    _, later = step(state, ShardsChanged(1, "a", (shard(0, 4),)), 0.0)
    assert not any(isinstance(effect, TellPeers) for effect in later)


def test_what_cannot_be_dialled_is_said_once_and_tried_until_it_can() -> None:
    state, effects = play((joined("a", 1), 0.0))
    assert [e.addresses for e in effects if isinstance(e, Dial)] == [("a:80", "a:1")]
    closed = Dialled("a", 1, (("a:1", "no answer within 4 s"),))
    state, after = step(state, closed, 1.0)
    said = [effect.line for effect in after if isinstance(effect, Say)]
    assert said == ["the tracker cannot reach a at a:1: no answer within 4 s"]
    told = [effect for effect in after if isinstance(effect, TellNotice)]
    assert (told[0].text, "ufw allow 1/tcp" in told[0].remedy) == (said[0], True)
    state, after = step(state, closed, 2.0)
    assert not after
    state, after = step(state, Beat(1, "a", 0, 1.0, 0.0, (), 0, 0, 0, 0, 0.0, 0), 11.0)
    state, after = step(state, Tick(0), 12.0)
    assert [e.addresses for e in after if isinstance(e, Dial)] == [("a:80", "a:1")]
    state, after = step(state, Dialled("a", 1, ()), 12.1)
    assert [effect.line for effect in after if isinstance(effect, Say)] == ["node reachable a"]
    assert not state.nodes["a"].unreachable
    # What was dialled for an earlier stream says nothing of this one.
    assert step(state, Dialled("a", 7, (("a:1", "x"),)), 13.0) == (state, ())


def test_broken_links_are_said_once_in_words() -> None:
    state, _ = play((joined("a", 1), 0.0), (joined("b", 2), 0.0))
    report = LinksMeasured(1, "a", {"b": LinkView(0, 0, "connection refused"), "nobody": LinkView(1, 1)})
    state, effects = step(state, report, 0.0)
    assert [effect.line for effect in effects if isinstance(effect, Say)] == [
        "node a cannot reach b at b:1: connection refused"
    ]
    assert ("a", "nobody") not in state.links
    _, effects = step(state, report, 1.0)
    assert effects == ()


def test_a_lost_node_is_forgotten_after_an_hour() -> None:
    state, _ = play((joined("a", 1), 0.0), (StreamEnded(1, "a", "gone"), 1.0), (Tick(0), 100.0))
    assert "a" in state.nodes
    state, _ = step(state, Tick(0), 4000.0)
    assert dict(state.nodes) == {}


def test_a_node_that_leaves_in_order_counts_no_loss() -> None:
    state, effects = play((joined("a", 1), 0.0), (StreamEnded(1, "a", "bye", leaving=True), 1.0))
    assert state.nodes["a"].losses == ()
    assert Gone("a", "bye") in effects


@given(st.lists(st.sampled_from(["mini", "Mini", "mini-2", "x"]), max_size=12))
def test_names_are_unique_whatever_is_wanted(wanted: list[str]) -> None:
    state = State(Rules())
    for number, name in enumerate(wanted):
        state, _ = step(state, joined(f"n{number}", number, name=name), 0.0)
    names = [node.name.lower() for node in state.nodes.values()]
    assert len(set(names)) == len(wanted)
    if state.nodes:
        assert unique_name("fresh", "other", state.nodes) == "fresh"


@given(st.lists(st.integers(0, 3), max_size=30))
def test_gaps_are_the_runs_without_a_holder(replicas: list[int]) -> None:
    found = gaps(replicas)
    assert [layer for a, b in found for layer in range(a, b + 1)] == [
        i for i, n in enumerate(replicas) if n == 0
    ]
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(found))


MOMENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "rejoin", "beat", "end", "probed", "failed", "tick"]),
        st.sampled_from("abc"),
        st.floats(0, 5),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(MOMENTS)
def test_any_history_leaves_one_stream_per_node_and_no_calls_on_lost_ones(
    moments: list[tuple[str, str, float]],
) -> None:
    state, now, connection, boot = State(Rules(flap_free=1)), 0.0, 0, 0
    open_streams: dict[int, str] = {}
    for what, node_id, passed in moments:
        now += passed
        node = state.nodes.get(node_id)
        event: Event
        if what in ("join", "rejoin"):
            connection += 1
            boot += what == "join"
            event = joined(node_id, connection, boot=boot if node is None or what == "join" else node.boot_id)
            open_streams[connection] = node_id
        elif what == "tick" or node is None or node.connection is None:
            event = Tick(0)
        elif what == "beat":
            event = beat(node_id, node.connection)
        elif what == "end":
            event = StreamEnded(node.connection, node_id, "broke")
            open_streams.pop(node.connection, None)
        else:
            event = Probed(node_id, node.boot_id, "m", "" if what == "probed" else "no")
        state, effects = step(state, event, now)
        for effect in effects:
            if isinstance(effect, Refuse | CloseStream):
                open_streams.pop(effect.connection, None)
        for known in state.nodes.values():
            assert known.connection is None or open_streams.get(known.connection) == known.node_id
            assert known.routable(now) <= known.connected
            if known.status(now) == "ready":
                assert all(item.probed for item in known.shards)
                assert not known.set_aside(now)
            assert len(known.losses) <= 64
            assert known.aside_until <= now + state.rules.flap_pause_max_s


async def test_a_tracker_that_stood_still_reads_what_came_before_it_judges() -> None:
    roster = Roster(Rules(lease_s=1.3), probe=lambda asked: asyncio.ensure_future(asyncio.sleep(0, "")))
    roster.start()
    roster.feed(joined("a", 1))
    await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_later(1.45, roster.feed, beat("a", 1))
    time.sleep(1.4)  # noqa: ASYNC251 - the whole process stands still
    await asyncio.sleep(0.3)
    assert roster.state.nodes["a"].connected
    await roster.stop()
