"""Nothing lost: whole meshes whose nodes are killed, stopped and cut off while calls run.

Every call must say what the undisturbed call says, byte for byte.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gates import gates
from support.mesh import run_mesh
from support.quad import ENGINE_THREADS, Asking, Heard, Quad, ask, wait_for
from support.random_gguf import random_model

from meshnet.models.store import Store

LAYERS = {"a1": "0-14", "a2": "0-14", "b1": "15-29", "b2": "15-29"}
PROMPT = "Tell me a story about a lighthouse keeper and the sea."
LONG = "Repeat the following list and go on with it. " + " ".join(f"Item {k} is a stone." for k in range(50))
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}
KINDS: tuple[dict[str, Any], ...] = (
    {"stream": True},
    {"stream": False},
    {"stream": True, **SAMPLED},
    {"stream": False, **SAMPLED, "seed": 12},
)
TOKENS = 48
SUBJECTS = (
    "The sea",
    "A lighthouse",
    "The oldest tree",
    "A clockmaker",
    "The night train",
    "Bread",
    "Winter",
    "A map",
)
TASKS = (
    "in three sentences, please.",
    "told as a story for children.",
    "described by somebody who hates it.",
    "as a list of five short facts.",
    "in a letter to a friend.",
)
OTHERS = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}


@pytest.fixture(scope="module")
def quad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quad]:
    """Two heads and two tails, each behind proxies; room for every call on half of them."""
    with run_mesh(tmp_path_factory.mktemp("quad")) as mesh, gates() as links:
        running = Quad(mesh, links, LAYERS, ("--slots", "44", "--ctx", "640"))
        running.start()
        yield running


@pytest.fixture(scope="module")
def undisturbed(quad: Quad) -> list[str]:
    """The answers of KINDS when nothing happens."""
    calls = [Asking(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), **kind) for kind in KINDS]
    heard = [call.result() for call in calls]
    assert all(one.ended == 1 and len(one.text) > TOKENS for one in heard), heard
    assert len({one.text for one in heard}) == 3
    return [one.text for one in heard]


def same(heard: Heard, text: str, quad: Quad, *, lost: str, gained: str) -> None:
    """The call said `text`, once, and its timeline tells how."""
    assert heard.error is None, heard
    assert heard.text == text
    assert heard.ended == 1
    call = quad.call(heard.call_id)
    assert call["phase"] == "complete"
    assert not call["numerics_changed"]
    assert not call["degraded"]
    moved = [m["detail"] for m in call["timeline"] if m["event"] == "rerouted"]
    assert moved, call["timeline"]
    assert lost in moved[0]["before"]
    assert lost not in moved[-1]["after"]
    assert gained in moved[-1]["after"]
    assert moved[0]["why"]
    assert call["reroutes"] == len(moved)


@pytest.mark.parametrize(
    ("victim", "how"),
    [(victim, how) for victim in ("b1", "a1") for how in ("kill", "cut", "swallow")]
    + [("a1", "cut the port")]
    + [pytest.param(victim, "stop", marks=pytest.mark.full) for victim in ("b1", "a1")],
)
def test_the_answers_are_the_undisturbed_ones(
    quad: Quad, undisturbed: list[str], victim: str, how: str
) -> None:
    """Streamed and not, greedy and sampled, all in flight when the node goes."""

    def strike(piece: int) -> None:
        if piece == 10:
            quad.break_(victim, how)

    calls = [Asking(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), **kind) for kind in KINDS[1:]]
    first = ask(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), on_piece=strike, **KINDS[0])
    heard = [first, *(call.result() for call in calls)]
    try:
        for one, text in zip(heard, undisturbed, strict=True):
            same(one, text, quad, lost=victim, gained=OTHERS[victim])
    finally:
        quad.mend()
    quad.settled()


def test_two_nodes_die_one_after_the_other(quad: Quad, undisturbed: list[str]) -> None:
    """First the tail, then the head, in the same calls."""

    def strike(piece: int) -> None:
        if piece in (6, 22):
            quad.break_({6: "b1", 22: "a1"}[piece], "kill")

    calls = [Asking(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), **kind) for kind in KINDS[1:]]
    first = ask(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), on_piece=strike, **KINDS[0])
    heard = [first, *(call.result() for call in calls)]
    try:
        for one, text in zip(heard, undisturbed, strict=True):
            same(one, text, quad, lost="b1", gained="b2")
        moved = [m["detail"] for m in quad.call(first.call_id)["timeline"] if m["event"] == "rerouted"]
        assert "a2" in moved[-1]["after"]
        assert "a1" not in moved[-1]["after"]
    finally:
        quad.mend()
    quad.settled()


@pytest.mark.parametrize("victim", ["b1", pytest.param("a1", marks=pytest.mark.full)])
def test_a_node_dies_in_prefill(quad: Quad, victim: str) -> None:
    """No token has come yet; the prompt is computed on whoever is left."""
    # Another text than any before, so that no kept prefix shortens the prefill.
    prompt = f"Now, without {victim}! {LONG}"
    call = Asking(quad.mesh, prompt, max_tokens=8, nodes=("a1", "b1"))
    progress = wait_for(lambda: prefilling(quad))
    quad.break_(victim, "kill")
    heard = call.result()
    try:
        assert heard.error is None, heard
        assert quad.call(heard.call_id)["reroutes"] == 1, (progress, quad.call(heard.call_id)["timeline"])
    finally:
        quad.mend()
    again = ask(quad.mesh, prompt, max_tokens=8, nodes=("a1", "b1"))
    assert heard.text == again.text
    quad.settled()


def prefilling(quad: Quad) -> dict[str, Any] | None:
    """The call that is at its prompt."""
    calls = quad.mesh.get("/api/calls")["calls"]
    return next((call for call in calls if call["phase"] in ("connected", "prefill")), None)


def test_a_head_dies_between_the_last_token_and_the_end(quad: Quad) -> None:
    """The last text is with the client, the end is not: it comes, once, from another head."""
    expected = ask(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"))

    def strike(piece: int) -> None:
        if piece == len(expected.times):
            quad.break_("a1", "kill")

    heard = ask(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), on_piece=strike)
    try:
        assert heard.error is None, heard
        assert (heard.text, heard.finish, heard.ended) == (expected.text, expected.finish, 1)
    finally:
        quad.mend()
    quad.settled()


@pytest.mark.full
def test_a_waiting_call_goes_where_nodes_are_left(quad: Quad) -> None:
    """All slots are taken, calls wait, and half of the mesh dies under them."""
    count = 100
    expected = ask(quad.mesh, PROMPT, max_tokens=4).text
    calls = [Asking(quad.mesh, PROMPT, max_tokens=4, stream=number % 2 == 0) for number in range(count)]
    wait_for(lambda: [c for c in quad.mesh.get("/api/calls")["calls"] if c["phase"] == "queued"])
    quad.break_("b1", "kill")
    try:
        heard = [call.result() for call in calls]
        assert [one.text for one in heard] == [expected] * count
    finally:
        quad.mend()
    quad.settled()


@pytest.mark.parametrize("count", [16, pytest.param(40, marks=pytest.mark.full)])
def test_many_streams_through_one_death(quad: Quad, count: int) -> None:
    """So many prompts x 64 tokens. They are at different points when the node dies, and no token differs."""
    prompts = [f"{subject} {task}" for task in TASKS for subject in SUBJECTS][:count]
    assert len(prompts) == count
    expected = [call.result() for call in [Asking(quad.mesh, p, max_tokens=64) for p in prompts]]
    assert all(one.error is None for one in expected)
    assert len({one.text for one in expected}) == count

    def strike(piece: int) -> None:
        if piece == 8:
            quad.break_("b1", "kill")

    calls = []
    for number, prompt in enumerate(prompts):
        act = strike if number == count * 3 // 4 else None
        calls.append(Asking(quad.mesh, prompt, max_tokens=64, nodes=("a1", "b1"), on_piece=act))
        time.sleep(2.0 / count)
    heard = [call.result() for call in calls]
    try:
        assert [one.error for one in heard] == [None] * count
        differing = [p for p, a, b in zip(prompts, expected, heard, strict=True) if a.text != b.text]
        assert differing == []
        moved = [quad.call(one.call_id) for one in heard]
        points = {call["output_tokens"] for call in moved if call["reroutes"]}
        assert sum(call["reroutes"] > 0 for call in moved) >= count // 4, points
        assert all(one.ended == 1 for one in heard)
    finally:
        quad.mend()
    quad.settled()


def test_a_node_slower_than_a_byte_a_time_is_left(quad: Quad, undisturbed: list[str]) -> None:
    """A peer that answers slowly, byte by byte, misses its deadline like a silent one."""

    def strike(piece: int) -> None:
        if piece == 10:
            quad.gates.set("b1", trickle_s=0.5)

    heard = ask(quad.mesh, PROMPT, max_tokens=TOKENS, nodes=("a1", "b1"), on_piece=strike)
    try:
        same(heard, undisturbed[0], quad, lost="b1", gained="b2")
    finally:
        quad.mend()
    quad.settled()


def another_class(quad: Quad, heard: Heard) -> None:
    """The call went on where only a node of another numerics class was left, and says so."""
    nodes = {node["name"]: node for node in quad.mesh.get("/api/nodes")["nodes"]}
    assert nodes["other"]["numerics_class"] == nodes["a"]["numerics_class"] + ";repacked"
    assert heard.error is None, heard
    assert (heard.ended, len(heard.times) > 10) == (1, True)
    call = quad.call(heard.call_id)
    assert call["phase"] == "complete"
    assert call["numerics_changed"]
    moved = [m["detail"] for m in call["timeline"] if m["event"] == "rerouted"]
    assert moved[-1]["after"] == "a[0-14]>other[15-29]"


def test_the_last_holder_dies(tmp_path: Path) -> None:
    """A node of another numerics class goes on, marked. Then no holder is left: `route_lost` with what was
    said so far. A fallback answers where nothing was said."""
    small = random_model(tmp_path, "llama")
    # The id that nodes will announce: another file of this name may be known here already.
    fallback = Store().pull(str(small)).id
    env = {"MESHNET_TRACKER_FALLBACK_MODELS": json.dumps({"smollm2-135m-instruct": fallback})}
    with run_mesh(tmp_path) as mesh, gates() as links:
        quad = Quad(mesh, links, {"a": "0-14", "b": "15-29"}, ("--slots", "4", "--ctx", "640"))
        quad.start(tracker_env=env)
        mesh.model = str(small)
        mesh.start_node("small", "0-39", *ENGINE_THREADS)
        mesh.model = "smollm2"
        mesh.start_node("other", "15-29", *ENGINE_THREADS, *quad.options, "--repack")
        mesh.wait_ready("small", "other")
        expected = ask(mesh, PROMPT, max_tokens=TOKENS, nodes=("a", "b"))

        def strike(piece: int) -> None:
            if piece == 10:
                quad.break_("b", "kill")

        another_class(quad, ask(mesh, PROMPT, max_tokens=TOKENS, nodes=("a", "b"), on_piece=strike))
        quad.mend()
        mesh.nodes.pop("other").kill()
        heard = ask(mesh, PROMPT, max_tokens=TOKENS, nodes=("a", "b"), on_piece=strike)
        assert heard.error is not None
        assert heard.error["code"] == "route_lost"
        assert 10 <= len(heard.times) < TOKENS
        assert expected.text.startswith(heard.text)
        assert heard.ended == 1
        call = quad.call(heard.call_id)
        assert call["phase"] == "failed"
        assert call["error"]["code"] == "route_lost"
        assert not call["degraded"]
        instead = ask(mesh, PROMPT, max_tokens=8)
        assert instead.error is None
        assert instead.model == fallback
        call = quad.call(instead.call_id)
        assert call["degraded"]
        assert call["model"] == fallback
        assert "degraded" in [moment["event"] for moment in call["timeline"]]
        quad.settled()
        quad.mend()
        assert ask(mesh, PROMPT, max_tokens=TOKENS).text == expected.text
