"""Which node is told to load or let go of what: the decision alone, over a real model's description."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.smollm2 import smollm2_path

from meshnet.models.gguf import ModelFile
from meshnet.tracker.allocation import Asked, Decision, Load, decide
from meshnet.tracker.members import Hardware, Node, ProbeWork, Shard, Times
from meshnet.tracker.weighing import memory_of, shard_bytes

LAST = 29
PLENTY = 8 << 30
NOW = 1_000.0


@pytest.fixture(scope="module")
def file() -> ModelFile:
    return ModelFile.open(smollm2_path())


def node(name: str, *shards: Shard, memory: int = PLENTY, placed: bool = True, **changes: object) -> Node:
    made = Node(
        node_id=name,
        name=name,
        boot_id=1,
        connection=1,
        http_url=f"http://{name}",
        grpc_address=f"{name}:1",
        hardware=Hardware(memory_bytes=memory),
        shards=shards,
        numerics_class="n",
        memory_limit_bytes=memory,
        memory_free_bytes=0,
        meshnet_version="",
        engine_version="",
        placement_wanted=placed,
        labels={},
        joined_ms=0,
        seen_ms=0,
        seen_at=0,
        n_slots=4,
        n_ctx=512,
        read_bytes_per_s=10e9,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def shard(first: int, last: int, model: str = "m", *, memory: int = 1 << 20, state: str = "ready") -> Shard:
    return Shard(
        model=model,
        fingerprint=model,
        arch="llama",
        start_layer=first,
        end_layer=last,
        model_layers=LAST + 1,
        entry_layers=(first,),
        mid_shard_entry=False,
        n_slots=4,
        n_ctx=512,
        n_embd=576,
        times=Times(0.2, 0.01, 0.01, 1.5 if last == LAST else 0.0),
        capacity_score=1.0,
        state=state,
        progress=1.0,
        error="",
        numerics_class="n",
        recurrent=False,
        card=None,
        memory_bytes=memory,
        free_slots=4,
        free_kv_tokens=2048,
        probed=state == "ready",
    )


def models(file: ModelFile, *ids: str, **times: tuple[float, float]) -> list[Asked]:
    """By default asked for at 1 and never used; `id=(asked_at, used_at)` says otherwise."""
    return [Asked(model, model, file, *times.get(model, (1.0, 0.0))) for model in ids]


def ranges(decision: Decision) -> dict[str, tuple[int, int]]:
    return {load.node_id: (load.first, load.last) for load in decision.loads}


def covered(decision: Decision) -> list[int]:
    return sorted(layer for load in decision.loads for layer in range(load.first, load.last + 1))


def test_one_empty_node_takes_the_whole_model(file: ModelFile) -> None:
    found = decide([node("a")], models(file, "m"), {}, NOW)
    assert found.loads == (Load("a", "m", 0, LAST),)
    assert found.unloads == ()
    assert found.why["m"]


def test_a_model_that_fits_no_node_is_spread(file: ModelFile) -> None:
    small = [node(name, memory=155_000_000) for name in "abc"]
    found = decide(small, models(file, "m"), {}, NOW)
    assert covered(found) == list(range(30))
    assert len(found.loads) == 3
    short = decide(small[:1], models(file, "m"), {}, NOW)
    assert short.loads == ()
    assert "add a node or memory" in short.waiting["m"]


def test_what_nodes_brought_is_never_moved(file: ModelFile) -> None:
    own = node("own", shard(0, 14), placed=False)
    found = decide([own, node("empty")], models(file, "m"), {}, NOW)
    assert ranges(found) == {"empty": (15, LAST)}
    alone = decide([own], models(file, "m"), {}, NOW)
    assert (alone.loads, alone.unloads) == ((), ())
    assert "m" in alone.waiting


def test_a_complete_mesh_is_left_alone_until_a_node_holds_nothing(file: ModelFile) -> None:
    held = [node("a", shard(0, 14)), node("b", shard(15, LAST))]
    assert decide(held, models(file, "m"), {}, NOW) == Decision((), (), {})
    found = decide([*held, node("c")], models(file, "m"), {}, NOW)
    assert set(ranges(found)) == {"c"}
    assert found.unloads == ()


def test_a_node_that_is_busy_or_could_not_is_not_asked(file: ModelFile) -> None:
    pending = {"a": Load("a", "m", 0, LAST)}
    assert decide([node("a")], models(file, "m"), {}, NOW, pending=pending).loads == ()
    found = decide([node("a"), node("b")], models(file, "m"), {}, NOW, failed={("a", "m")})
    assert ranges(found) == {"b": (0, LAST)}
    gone = node("a", draining=True)
    assert ranges(decide([gone, node("b")], models(file, "m"), {}, NOW)) == {"b": (0, LAST)}
    elsewhere = node("a", connection=None, via="another tracker")
    assert decide([elsewhere], models(file, "m"), {}, NOW).loads == ()


def test_what_a_larger_shard_has_is_let_go_once_that_is_loaded(file: ModelFile) -> None:
    loading = node("a", shard(0, 9), shard(0, LAST, state="loading"))
    assert decide([loading], models(file, "m"), {}, NOW).unloads == ()
    found = decide([node("a", shard(0, 9), shard(0, LAST))], models(file, "m"), {}, NOW)
    assert [(u.first, u.last, u.evicts) for u in found.unloads] == [(0, 9, False)]


def test_no_layer_goes_that_nobody_else_holds(file: ModelFile) -> None:
    """`a` would have to let go of 0-9 before it can load more: only where others hold them."""
    room = node("x", n_slots=4)
    memory = shard_bytes(room, file, 0, LAST) + 60_000_000
    first = shard(0, 9, memory=100_000_000)
    alone = decide([node("a", first, memory=memory)], models(file, "m"), {}, NOW)
    assert (alone.loads, alone.unloads) == ((), ())
    assert any("stays as it is" in line for line in alone.why["m"])
    other = node("b", shard(0, 9), placed=False)
    found = decide([node("a", first, memory=memory), other], models(file, "m"), {}, NOW)
    assert [u.node_id for u in found.unloads] in ([], ["a"])
    if not found.unloads:
        assert covered(found)[-1] == LAST


def test_a_model_that_is_off_is_let_go(file: ModelFile) -> None:
    mesh = [node("a", shard(0, LAST)), node("b", shard(0, LAST), placed=False)]
    found = decide(mesh, models(file, "m"), {}, NOW, off={"m"})
    assert [u.node_id for u in found.unloads] == ["a"]
    assert found.loads == ()


def test_replicas_make_room_first_then_the_model_that_is_idle_for_the_longest(file: ModelFile) -> None:
    memory = 250_000_000
    held = shard_bytes(node("x"), file, 0, LAST)
    old, used = shard(0, LAST, "old", memory=held), shard(0, LAST, "used", memory=held)
    asked = models(file, "old", "used", "new", old=(1.0, 2.0), used=(1.0, 500.0), new=(900.0, 0.0))
    spare = [node("a", old, memory=memory), node("b", replace(old), memory=memory)]
    found = decide(spare, asked[:1] + asked[2:], {}, NOW)
    assert [(u.model_id, u.evicts) for u in found.unloads] == [("old", False)]
    full = [node("a", old, memory=memory), node("b", used, memory=memory)]
    found = decide(full, asked, {}, NOW)
    assert [(u.node_id, u.model_id, u.evicts) for u in found.unloads] == [("a", "old", True)]
    assert found.loads == (), "first it has to be gone"
    # What was used after the new one was asked for stays; so does what is asked for longer than that.
    busy = models(file, "old", "used", "new", old=(1.0, 950.0), used=(1.0, 960.0), new=(900.0, 0.0))
    kept = decide(full, busy, {}, NOW)
    assert kept.unloads == ()
    assert "new" in kept.waiting
    # And who was evicted does not come back by evicting others.
    after = decide([node("a", shard(0, LAST, "new", memory=held), memory=memory), full[1]], asked, {}, NOW)
    assert (after.loads, after.unloads) == ((), ())
    assert "old" in after.waiting


def test_memory_is_what_is_free_and_held_within_the_limit() -> None:
    assert memory_of(node("a", memory=1000)) == 1000
    assert memory_of(node("a", shard(0, 1, memory=300), memory=1000, memory_free_bytes=200)) == 500
    assert memory_of(node("a", memory=1000, reserved_bytes=64)) == 936


def test_a_node_that_probes_do_not_reach_holds_nothing_for_the_mesh(file: ModelFile) -> None:
    behind = node("behind", replace(shard(0, LAST), probed=False), probe=ProbeWork(failures=2, error="away"))
    once = replace(behind, probe=ProbeWork(failures=1, error="away"))

    def told(first: Node) -> set[int]:
        found = decide([first, node("open"), node("other")], models(file, "m"), {}, NOW)
        assert "behind" not in {load.node_id for load in found.loads}
        return {layer for load in found.loads for layer in range(load.first, load.last + 1)}

    everything = set(range(LAST + 1))
    assert told(once) < everything
    assert told(behind) == everything
