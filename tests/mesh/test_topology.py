"""The mixed topology: a head with layers 0-21 and a full node with 0-39 of one 40-layer model.

Whoever follows a stage that ended at layer 21 starts at 22, whatever its own first layer is. Sending it
its own first layer runs layers twice: garbage, one token, and a bill.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mesh import Demo, answer_text, chat, run_demo
from support.random_gguf import random_model

PROMPTS = ("Tell me about the sea.", "the of and in is", "x" * 700)


@pytest.fixture(scope="module", params=["llama", "qwen35moe"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp(f"mixed-{request.param}")
    model = random_model(folder, request.param)
    with run_demo(folder, "--cuts", "22", "--overlap", "--model", str(model)) as running:
        yield running


def _model_id(demo: Demo) -> str:
    with demo.client() as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


def _by_layers(demo: Demo) -> tuple[str, str]:
    head = next(node["node_id"] for node in demo.nodes if node["layers"] == [0, 21])
    full = next(node["node_id"] for node in demo.nodes if node["layers"] == [0, 39])
    return head, full


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "words", "long"])
def test_forced_through_the_head_gives_the_full_nodes_tokens(mixed: Demo, prompt: str) -> None:
    model = _model_id(mixed)
    head, full = _by_layers(mixed)
    with mixed.client(admin=True) as client:
        alone = chat(client, prompt, model=model, max_tokens=48, headers={"X-Meshnet-Nodes": full})
        split = chat(
            client, prompt, model=model, max_tokens=48, headers={"X-Meshnet-Nodes": f"{head},{full}"}
        )
    assert len(answer_text(alone)) > 20
    assert answer_text(split) == answer_text(alone)
    assert split.json()["usage"] == alone.json()["usage"]
    call = mixed.get(f"/api/calls/{split.headers['x-meshnet-call']}")
    stages = [(s["node_id"], s["start_layer"], s["end_layer"]) for s in call["stages"]]
    assert stages == [(head, 0, 21), (full, 22, 39)]


def test_the_downstream_hop_starts_at_22_in_the_event_and_at_the_node(mixed: Demo) -> None:
    head, full = _by_layers(mixed)
    with mixed.client(admin=True) as client:
        response = chat(
            client,
            "Hello there",
            model=_model_id(mixed),
            max_tokens=8,
            headers={"X-Meshnet-Nodes": f"{head},{full}"},
        )
    answer_text(response)
    call_id = response.headers["x-meshnet-call"]
    events = mixed.get("/api/console?since=0")["events"]
    selected = next(e for e in events if e["event"] == "proxy route selected" and e["call_id"] == call_id)
    assert [hop["start_layer"] for hop in selected["downstream"]] == [22]
    assert "downstream start_layer=22" in selected["line"]
    # What the node itself was asked for stands in its own log.
    opened = [
        line
        for line in mixed.process.log.read_text(errors="replace").splitlines()
        if call_id in line and "session opened" in line
    ]
    assert any("start_layer=22" in line or '"start_layer": 22' in line for line in opened), opened


def test_left_to_itself_it_takes_the_full_node_unless_the_pipeline_is_faster(mixed: Demo) -> None:
    model = _model_id(mixed)
    _, full = _by_layers(mixed)
    with mixed.client() as client:
        response = chat(client, "Hello there", model=model, max_tokens=8)
    answer_text(response)
    call = mixed.get(f"/api/calls/{response.headers['x-meshnet-call']}")
    nodes = [stage["node_id"] for stage in call["stages"]]
    if nodes != [full]:
        with mixed.client(admin=True) as client:
            plan = client.post("/api/route/preview", json={"model": model}).json()
        single = [c for c in plan["explanation"]["candidates"] if len(c["stages"]) == 1]
        chosen = plan["explanation"]["candidates"][0]
        assert single, plan
        assert chosen["total_ms"] <= 0.9 * min(c["total_ms"] for c in single)


def test_nodes_that_cannot_cover_the_model_are_409_naming_the_gap(mixed: Demo) -> None:
    head, _ = _by_layers(mixed)
    with mixed.client(admin=True) as client:
        response = chat(client, "Hello", model=_model_id(mixed), headers={"X-Meshnet-Nodes": head})
    assert response.status_code == 409, response.text
    assert "22-39" in response.json()["error"]["message"]


def test_a_use_key_may_not_force_a_route(mixed: Demo) -> None:
    head, full = _by_layers(mixed)
    with mixed.client() as client:
        response = chat(
            client, "Hello", model=_model_id(mixed), headers={"X-Meshnet-Nodes": f"{head},{full}"}
        )
    assert response.status_code == 403, response.text


def test_shards_of_the_wrong_layers_are_never_served(tmp_path: Path) -> None:
    """A negative control for the tests above: a different model gives different text."""
    texts = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        model = random_model(folder, "llama", seed=seed)
        with run_demo(folder, "--cuts", "", "--model", str(model)) as running, running.client() as client:
            texts.append(answer_text(chat(client, PROMPTS[0], model=_model_id(running), max_tokens=24)))
    assert texts[0] != texts[1]
