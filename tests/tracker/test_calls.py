"""A call's state machine: every way through ends exactly once, with the right end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.protocol.calls import NO_WAY_BACK
from meshnet.tracker.calls import (
    MAX_FORGIVEN,
    Cancelled,
    Connected,
    Effect,
    End,
    Event,
    Finished,
    GoOn,
    HeadFailed,
    NodeLost,
    NoPlace,
    Open,
    Place,
    Placed,
    PrefillBegan,
    Queued,
    Refused,
    Repair,
    Reroute,
    Rules,
    State,
    TokensCame,
    UseFallback,
    step,
)


def run(events: list[Event], rules: Rules | None = None) -> tuple[State, list[Effect]]:
    state = State(rules or Rules())
    effects: list[Effect] = []
    for event in events:
        state, more = step(state, event)
        effects += more
    return state, effects


def test_a_call_from_its_queue_to_its_end() -> None:
    events: list[Event] = [
        Queued(),
        Placed(("a", "b")),
        Connected(),
        PrefillBegan(),
        TokensCame(),
        Finished(),
    ]
    phases, state = [], State(Rules())
    for event in events:
        state, _ = step(state, event)
        phases.append(state.phase)
    assert phases == ["queued", "route_selected", "connected", "prefill", "generating", "complete"]
    assert run(events)[1] == [Open(), End("complete")]


def test_a_downstream_node_is_repaired_and_the_head_told() -> None:
    state, effects = run(
        [
            Placed(("a", "b")),
            Connected(),
            TokensCame(),
            NodeLost("b", "deadline", "silent"),
            Placed(("a", "c"), same_head=True),
        ]
    )
    assert effects == [Open(), Repair(frozenset({"b"}), frozenset({"b"})), Reroute()]
    assert (state.epoch, state.nodes, state.reroutes, state.repairing) == (1, ("a", "c"), 1, True)
    state, _ = step(state, TokensCame())
    assert not state.repairing


def test_a_failed_head_is_replaced_with_a_new_attempt() -> None:
    state, effects = run(
        [Placed(("a", "b")), TokensCame(), HeadFailed("unreachable", "gone"), Placed(("c",))]
    )
    assert effects == [Open(), Place(frozenset({"a"})), Open()]
    assert state.epoch == 1


def test_what_the_head_says_of_itself_counts_as_its_own_failure() -> None:
    _, effects = run([Placed(("a", "b")), NodeLost("a", "engine", "broken")])
    assert effects[-1] == Place(frozenset({"a"}))


def test_a_report_about_a_stranger_blames_nobody() -> None:
    _, effects = run([Placed(("a", "b")), NodeLost("z", "engine", "broken")])
    assert effects[-1] == Place(frozenset())


def test_a_tail_that_does_not_reach_two_heads_is_at_fault_before_that_the_head_is() -> None:
    none = NodeLost("t", NO_WAY_BACK, "cannot reach it")
    begun: list[Event] = [Placed(("a", "t")), TokensCame(), none]
    _, effects = run(begun)
    assert effects[-1] == Place(frozenset({"a"}))
    _, effects = run([*begun, Placed(("b", "t")), none])
    assert effects[-1] == Repair(frozenset({"t"}), frozenset({"a", "t"}))


def test_a_report_that_the_tracker_has_acted_on_already_changes_nothing() -> None:
    events: list[Event] = [Placed(("a", "b")), TokensCame(), NodeLost("b", "lost", "by the mesh")]
    state, _ = run([*events, Placed(("a", "c"), same_head=True)])
    after, effects = step(state, NodeLost("b", "unreachable", "by the head"))
    assert effects == (GoOn(),)
    assert after == state


def test_a_busy_node_is_avoided_and_may_take_the_call_later() -> None:
    state, effects = run([Placed(("a", "b")), NodeLost("b", "busy", "no slots")])
    assert effects[-1] == Repair(frozenset({"b"}), frozenset(), frozenset({"b"}))
    assert (state.excluded, state.reroutes) == (frozenset(), 0)
    state, effects = run([Placed(("a",)), HeadFailed("busy", "no slots")])
    assert effects[-1] == Place(frozenset(), frozenset({"a"}))
    again: list[Event] = [HeadFailed("busy", "no slots"), Placed(("a",))]
    assert run([Placed(("a",)), *again * 60])[1][-1] == End(
        "failed", 503, "busy", "nodes refused the call 41 times: busy"
    )


def test_no_place_ends_by_how_far_the_call_has_come() -> None:
    none = NoPlace(503, "no_route", "nobody")
    assert run([none])[1] == [End("failed", 503, "no_route", "nobody")]
    _, effects = run([Placed(("a", "b")), TokensCame(), NodeLost("b", "x", "y"), none, none])
    assert effects[-1] == End("failed", 503, "route_lost", "nobody")


def test_nodes_that_failed_a_call_are_tried_again_when_no_others_are_left() -> None:
    none = NoPlace(503, "no_route", "nobody")
    begun: list[Event] = [Placed(("a", "b")), TokensCame(), NodeLost("b", "x", "y")]
    state, effects = run([*begun, none])
    assert effects[-1] == Place(frozenset(), again=True)
    assert state.excluded == frozenset()
    state, effects = run([*begun, none, Placed(("a", "b")), HeadFailed("x", "y")])
    assert effects[-1] == Place(frozenset({"a"}), frozenset())
    again: list[Event] = [none, Placed(("a", "b")), HeadFailed("x", "y")]
    _, effects = run([*begun, *again * MAX_FORGIVEN, none])
    assert effects[-1] == End("failed", 503, "route_lost", "nobody")
    _, effects = run([*begun, NoPlace(503, "queue_timeout", "busy")])
    assert effects[-1] == End("failed", 503, "route_lost", "busy")


def test_the_fallback_answers_only_while_nothing_was_sent_and_only_once() -> None:
    none = NoPlace(503, "no_route", "nobody")
    rules = Rules(fallback=True)
    state, effects = run([none], rules)
    assert effects == [UseFallback()]
    assert state.degraded
    assert run([none, none], rules)[1][-1] == End("failed", 503, "no_route", "nobody")
    _, effects = run([Placed(("a", "b")), TokensCame(), NodeLost("b", "x", "y"), none, none], rules)
    assert effects[-1] == End("failed", 503, "route_lost", "nobody")
    _, effects = run([Placed(("a", "b")), TokensCame(sent=False), NodeLost("b", "x", "y"), none], rules)
    assert effects[-1] == UseFallback()


def test_repairs_are_bounded() -> None:
    events: list[Event] = [Placed(("a", "b"))]
    for number in range(4):
        events += [NodeLost("b", "x", "y") if number == 0 else HeadFailed("x", "y"), Placed(("a", "b"))]
    _, effects = run(events, Rules(max_reroutes=3))
    assert isinstance(effects[-1], End)
    assert effects[-1].code == "route_lost"


def test_who_is_at_fault_decides_the_status() -> None:
    assert run([Placed(("a",)), Refused(400, "bad", "no", "n")])[1][-1] == End(
        "failed", 400, "bad", "no", "n"
    )
    assert run([Cancelled("client_gone", "x")])[1] == [End("cancelled", 499, "client_gone", "x")]
    assert run([Cancelled("call_limit", "x", failed_with=504)])[1] == [End("failed", 504, "call_limit", "x")]


EVENTS = st.one_of(
    st.just(Queued()),
    st.builds(Placed, st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple), st.booleans()),
    st.builds(NoPlace, st.just(503), st.sampled_from(["no_route", "queue_timeout"]), st.just("m")),
    st.just(Connected()),
    st.just(PrefillBegan()),
    st.builds(TokensCame, st.booleans()),
    st.builds(NodeLost, st.sampled_from("abcz"), st.just("x"), st.just("m")),
    st.builds(HeadFailed, st.just("x"), st.just("m")),
    st.builds(Refused, st.just(400), st.just("bad"), st.just("m")),
    st.just(Finished()),
    st.builds(Cancelled, st.just("c"), st.just("m")),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_every_sequence_ends_at_most_once_and_nothing_follows_the_end(
    events: list[Event], fallback: bool
) -> None:
    state, ends = State(Rules(max_reroutes=3, fallback=fallback)), 0
    for event in events:
        was_ended, before = state.ended, state
        state, effects = step(state, event)
        ends += sum(isinstance(effect, End) for effect in effects)
        if was_ended:
            assert effects == ()
            assert state is before
        assert state.ended == (ends == 1)
        assert ends <= 1
        assert state.epoch >= before.epoch
