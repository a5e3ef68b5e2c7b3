"""What the client tests look at besides the answers: calls, and whether nodes still compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
from support.mesh import Demo

STOP_SECONDS = 3.0
"""Three times the second within which every node must have stopped."""
QUIET_SECONDS = 0.5
STORY = "Write a very long story about a fox who learns to sail."


def computed_tokens(demo: Demo) -> float:
    """Tokens that all nodes have run through their layers so far."""
    total = 0.0
    for node in demo.nodes:
        text = httpx.get(f"{node['http_url']}/metrics", timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith("meshnet_node_step_tokens_total")]
        assert lines, "the node does not count its tokens"
        total += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return total


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def newest_call(demo: Demo) -> dict[str, Any]:
    calls: list[dict[str, Any]] = demo.get("/api/calls")["calls"]
    return max(calls, key=lambda call: call["accepted_ms"])


def check_stopped(demo: Demo, call_id: str) -> None:
    """Within the deadline from now: the call is cancelled, no node computes, all slots are free again."""
    begun = time.monotonic()

    def cancelled() -> bool:
        return bool(demo.get(f"/api/calls/{call_id}")["phase"] == "cancelled")

    wait_until(cancelled, STOP_SECONDS, "the call is cancelled")
    left = STOP_SECONDS - (time.monotonic() - begun)
    wait_until(lambda: _still(demo), left + QUIET_SECONDS, "the nodes stand still")
    # Loads come with heartbeats, once a second.
    wait_until(lambda: not any(_loads(demo)), 6.0, "slots are free")


def _loads(demo: Demo) -> list[float]:
    return [node["current_load"] for node in demo.get("/api/nodes")["nodes"]]


def _still(demo: Demo) -> bool:
    before = computed_tokens(demo)
    time.sleep(QUIET_SECONDS)
    return computed_tokens(demo) == before
