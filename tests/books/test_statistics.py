"""Statistics that count what they should, and the story of the pipeline that was absurdly fast."""

from __future__ import annotations

from dataclasses import replace

import pytest
from books.kit import START

from meshnet.routing import Link, MeasuredCost, NodeState, NodeTimes, RoutingRequest, plan
from meshnet.tracker.books.guard import GuardRules, suspicion
from meshnet.tracker.books.statistics import (
    ENOUGH_SAMPLES,
    MAX_SAMPLES,
    MAX_SERIES,
    WINDOW_MS,
    CallSample,
    StageTimes,
    Statistics,
    observed,
)
from meshnet.tracker.books.trust import DISTRUSTED, LEAST, RECOVERY_MS, Trust, tempered

MODEL = "smollm2"


def sample(
    call_id: str = "c",
    nodes: tuple[str, ...] = ("a", "b"),
    *,
    output: int = 100,
    decode_ms: float = 2_000.0,
    prefill_ms: float = 100.0,
    **changes: object,
) -> CallSample:
    """A call over nodes that share 30 layers evenly; each takes `decode_ms` of computing for its part."""
    layers = 30 // len(nodes)
    stages = tuple(
        StageTimes(node, i * layers, i * layers + layers - 1, 50, prefill_ms, output, decode_ms, 2.0)
        for i, node in enumerate(nodes)
    )
    made = CallSample(
        call_id=call_id,
        model=MODEL,
        at=START,
        outcome="complete",
        stages=stages,
        prompt_tokens=50,
        output_tokens=output,
        ttft_ms=250.0,
        generation_ms=2.0 * decode_ms,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_figures_of_nodes_and_routes() -> None:
    statistics = Statistics()
    assert statistics.record(sample("c1")) is None
    node = statistics.node("a", MODEL, START)
    assert node.samples == 1
    assert node.decode_tokens_per_s == pytest.approx(50.0)
    assert node.prefill_tokens_per_s == pytest.approx(500.0)
    assert node.decode_ms_per_layer == pytest.approx(2_000 / (100 * 15))
    assert node.prefill_ms_per_token_layer == pytest.approx(100 / (50 * 15))
    assert node.link_ms == 2.0
    assert node.success_rate == 1.0
    route = statistics.route(MODEL, [("a", 0, 14), ("b", 15, 29)], START)
    assert route.decode_tokens_per_s == pytest.approx(99 / 4.0)
    assert route.prefill_tokens_per_s == pytest.approx(200.0)
    assert route.ttft_ms == 250.0
    assert route.link_ms == 4.0
    assert statistics.route(MODEL, [("a", 0, 29)], START).samples == 0


def test_long_calls_weigh_more_than_short_ones() -> None:
    statistics = Statistics()
    statistics.record(sample("long", output=1_000, decode_ms=10_000.0))
    statistics.record(sample("short", output=10, decode_ms=10_000.0))
    speed = statistics.node("a", MODEL, START).decode_tokens_per_s
    assert speed == pytest.approx(1_010 / 20.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output": 7}, "too few tokens"),
        ({"output": 1}, "too few tokens"),
        ({"outcome": "cancelled"}, "cancelled"),
        ({"outcome": "failed"}, "failed"),
        ({"rerouted": True}, "rerouted"),
        ({"suspect": True, "output": 2}, "suspect"),
    ],
)
def test_samples_that_are_kept_and_never_count(changes: dict[str, object], reason: str) -> None:
    statistics = Statistics()
    statistics.record(sample("good"))
    before = statistics.node("a", MODEL, START)
    absurd = sample("bad", decode_ms=0.001, prefill_ms=0.001, **changes)  # type: ignore[arg-type]
    assert statistics.record(absurd) == reason
    after = statistics.node("a", MODEL, START)
    assert after.excluded == {reason: 1}
    assert replace(after, excluded={}, success_rate=None) == replace(before, success_rate=None)
    assert statistics.route(MODEL, [("a", 0, 14), ("b", 15, 29)], START).excluded == {reason: 1}


def test_eight_tokens_count() -> None:
    assert Statistics().record(sample(output=8)) is None


def test_the_window_rolls() -> None:
    statistics = Statistics()
    statistics.record(sample("old", decode_ms=1_000.0))
    statistics.record(sample("new", decode_ms=4_000.0, at=START + WINDOW_MS // 2))
    assert statistics.node("a", MODEL, START + WINDOW_MS // 2).samples == 2
    later = statistics.node("a", MODEL, START + WINDOW_MS)
    assert later.samples == 1
    assert later.decode_tokens_per_s == pytest.approx(25.0)
    assert statistics.nodes(START + 2 * WINDOW_MS) == []


def test_success_is_charged_to_the_node_that_failed() -> None:
    statistics = Statistics()
    statistics.record(sample("ok"))
    statistics.record(sample("broken", outcome="failed", failed_nodes=("b",)))
    statistics.record(sample("saved", ("a", "c"), rerouted=True, failed_nodes=("b",)))
    statistics.record(sample("left", outcome="cancelled"))
    assert statistics.node("a", MODEL, START).success_rate == 1.0
    assert statistics.node("b", MODEL, START).success_rate == pytest.approx(1 / 3)
    assert statistics.route(MODEL, [("a", 0, 14), ("b", 15, 29)], START).success_rate == 0.5


def test_samples_can_be_taken_back_and_admitted_again() -> None:
    statistics = Statistics()
    statistics.record(sample("c1"))
    assert statistics.node("a", MODEL, START).samples == 1
    statistics.exclude("c1", "failed check")
    assert statistics.node("a", MODEL, START).excluded == {"failed check": 1}
    statistics.record(sample("c2", output=9, suspect=True))
    statistics.record(sample("c3", output=3, suspect=True))
    statistics.admit("c2")
    statistics.admit("c3")
    figures = statistics.node("a", MODEL, START)
    assert figures.samples == 1
    assert figures.excluded == {"failed check": 1, "too few tokens": 1}
    statistics.exclude("unknown", "failed check")


def test_memory_is_bounded() -> None:
    statistics = Statistics()
    for number in range(MAX_SAMPLES + 10):
        statistics.record(sample(f"c{number}"))
    assert statistics.node("a", MODEL, START).samples == MAX_SAMPLES
    for number in range(MAX_SERIES + 5):
        statistics.record(sample("c", (f"n{number}",)))
    assert len(statistics.nodes(START)) == MAX_SERIES
    assert len(statistics.routes(START)) == MAX_SERIES


def test_claims_are_believed_as_far_as_calls_bear_them_out() -> None:
    statistics = Statistics()
    claimed = NodeTimes(decode_ms_per_layer=0.5, prefill_ms_per_token_layer=0.5)
    for number in range(ENOUGH_SAMPLES):
        assert observed(claimed, statistics.node("a", MODEL, START)) == claimed
        statistics.record(sample(f"c{number}"))
    believed = observed(claimed, statistics.node("a", MODEL, START))
    assert believed.decode_ms_per_layer == pytest.approx(2_000 / 1_500)
    assert believed.prefill_ms_per_token_layer == 0.5


# ---------------------------------------------------------------- the story


def layers(node: str, first: int, last: int) -> NodeState:
    return NodeState(node, served_layers=((first, last),), mid_shard_entry=True)


STATES = [layers("head", 0, 14), layers("tail", 15, 29), layers("rival", 15, 29)]
HONEST = NodeTimes(decode_ms_per_layer=1.0, prefill_ms_per_token_layer=0.1)
LINKS = {(a.node_id, b.node_id): Link(1.0, 1e8) for a in STATES for b in STATES}


def next_route(statistics: Statistics, trust: Trust, now: int) -> tuple[str, ...]:
    """The route that the planner chooses when it believes what the statistics say of each node."""
    times = {}
    for state in STATES:
        figures = statistics.node(state.node_id, MODEL, now)
        seen = figures.decode_ms_per_layer
        base = HONEST if seen is None else replace(HONEST, decode_ms_per_layer=seen)
        times[state.node_id] = tempered(base, trust.score(state.node_id, now))
    cost = MeasuredCost(times=times, links=LINKS, token_bytes=4 * 576)
    request = RoutingRequest(layer_range=(0, 29), prompt_tokens=50, expected_tokens=100)
    return plan(request, STATES, cost, excluded=trust.distrusted(now)).route.node_ids


def calls_of(statistics: Statistics, rules: GuardRules) -> list[str]:
    """Ten good calls over head and tail, then ten over head and rival that end after one token at once."""
    suspects = []
    for number in range(10):
        good = sample(f"good{number}", ("head", "tail"), decode_ms=1_500.0)
        statistics.record(good)
        broken = sample(f"broken{number}", ("head", "rival"), output=1, decode_ms=0.015)
        suspect = suspicion(1, "eos", 2, rules) is not None
        statistics.record(replace(broken, suspect=suspect))
        if suspect:
            suspects.append(broken.call_id)
    return suspects


def test_a_broken_pipeline_that_ends_after_one_token_does_not_win_the_next_route() -> None:
    statistics, trust = Statistics(), Trust()
    suspects = calls_of(statistics, GuardRules())
    assert len(suspects) == 10
    assert statistics.node("rival", MODEL, START).excluded == {"suspect": 10}
    # Both are said to be equally fast, so without anything against it the first name would win:
    assert next_route(statistics, trust, START) == ("head", "rival")
    trust.mark(["head", "rival"], "suspect", START, suspects[0])
    assert next_route(statistics, trust, START) == ("head", "tail")


def test_without_the_exclusions_the_broken_pipeline_would_win() -> None:
    """The control: the same calls, with nothing excluded."""
    statistics = Statistics(min_output_tokens=0)
    assert calls_of(statistics, GuardRules(min_tokens=0)) == []
    absurd = statistics.node("rival", MODEL, START).decode_tokens_per_s
    honest = statistics.node("tail", MODEL, START).decode_tokens_per_s
    assert absurd is not None
    assert honest is not None
    assert absurd > 100 * honest
    assert next_route(statistics, Trust(), START) == ("head", "rival")


def test_a_node_loses_routes_with_its_trust_and_earns_them_back() -> None:
    statistics, trust = Statistics(), Trust()
    calls_of(statistics, GuardRules())
    trust.mark(["rival"], "failed", START, "broken0", "token 0 lies 9.1 below the maximum")
    assert trust.score("rival", START) == pytest.approx(0.4)
    assert list(trust.distrusted(START)) == ["rival"]
    assert next_route(statistics, trust, START) == ("head", "tail")
    standing = trust.standing("rival", START)
    assert (standing.failed, standing.marks[0].call_id) == (1, "broken0")
    for _ in range(3):
        trust.mark(["rival"], "passed", START, "probe")
    assert trust.score("rival", START) > DISTRUSTED
    for _ in range(400):
        trust.mark(["rival"], "good", START)
    assert trust.score("rival", START) == pytest.approx(1.0, abs=1e-3)
    assert trust.distrusted(START) == {}


def test_trust_comes_back_by_halves_and_never_falls_to_nothing() -> None:
    trust = Trust()
    for _ in range(20):
        trust.mark(["n"], "failed", START)
    assert trust.score("n", START) == pytest.approx(LEAST)
    assert trust.score("n", START + RECOVERY_MS) == pytest.approx(1 - (1 - LEAST) / 2)
    assert trust.score("n", START + 20 * RECOVERY_MS) == pytest.approx(1.0, abs=1e-5)
    assert trust.score("never seen", START) == 1.0
    trust.mark(["good"], "good", START)
    assert list(trust.all(START)) == ["n"]


def test_a_distrusted_node_is_still_used_when_nothing_else_is_left() -> None:
    times = NodeTimes(1.0, 1.0, embed_ms=1.0)
    slow = tempered(times, 0.1)
    assert slow.decode_ms_per_layer == pytest.approx(10.0)
    assert slow.embed_ms == 1.0
    assert tempered(times, 1.0) is times
