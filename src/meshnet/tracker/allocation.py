"""Which node should load or let go of which layers next, of all models at once. Pure.

Models with layers that nobody holds come first, the last asked for before the others; then nodes that hold
nothing yet replicate. What is held stays where it is as far as `place` allows, and a shard goes only when

- a larger one on its node, which is loaded, has its layers;
- its model is not to be served any more;
- other usable nodes hold all of its layers, and its node has no room for what it is to hold;
- another model was asked for that has no room otherwise. Replicas go first; then the model whose last call
  lies back farthest, unless it was used after the other was asked for.

Nodes that were started with layers of their own are never moved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshnet.models.gguf import ModelFile
from meshnet.routing import Link
from meshnet.routing.errors import runs
from meshnet.routing.placement import (
    ModelLayers,
    Objective,
    Placement,
    PlacementImpossible,
    PlacementNode,
    place,
)
from meshnet.tracker.members import Node, Shard
from meshnet.tracker.weighing import (
    compute_bytes,
    kv_bytes,
    layer_ms,
    memory_of,
    model_layers,
    shard_bytes,
)

LayerRange = tuple[int, int]
HELD = ("ready", "loading")
PROBES_MISSED = 2
"""A node that left so many probes in a row unanswered holds nothing that calls could reach."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A model that the mesh is to serve: its description, when it was asked for (-inf: nobody did, nodes
    brought it) and last used (-inf: never), both in seconds of one clock."""

    model_id: str
    fingerprint: str
    file: ModelFile
    asked_at: float = -math.inf
    used_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Load:
    node_id: str
    model_id: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Unload:
    """`evicts`: the model goes as a whole, to make room for another."""

    node_id: str
    model_id: str
    first: int
    last: int
    why: str
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and per model why, in sentences for people."""

    loads: tuple[Load, ...]
    unloads: tuple[Unload, ...]
    why: Mapping[str, tuple[str, ...]]
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Models that cannot be placed, and what is missing."""


@dataclass(slots=True)
class _Seat:
    """A node as the decision goes on: what it holds of each model, and the room that is left."""

    node: Node
    movable: bool
    shards: list[Shard]
    memory: int
    coming: list[Load]

    def held(self, model_id: str) -> list[LayerRange]:
        """Ranges of a model that it has or will have."""
        own = [(s.start_layer, s.end_layer) for s in self.shards if s.model == model_id]
        return sorted({*own, *((c.first, c.last) for c in self.coming if c.model_id == model_id)})


def movable(node: Node, now: float) -> bool:
    """Whether the tracker may place shards on a node: it wants them, is on a stream of ours, and well."""
    return node.placement_wanted and node.connection is not None and node.routable(now)


def decide(
    nodes: Iterable[Node],
    asked: Iterable[Asked],
    links: Mapping[tuple[str, str], Link],
    now: float,
    *,
    off: Collection[str] = (),
    pending: Mapping[str, Load] | None = None,
    failed: Collection[tuple[str, str]] = (),
    again: Collection[str] = (),
) -> Decision:
    """The next moves. `off`: models that are not to be placed; `pending`: loads that are under way; `failed`:
    (node, model) that did not work just now; `again`: models to be placed anew even where nothing is missing.
    """
    return _Decider(nodes, asked, links, now, off, pending or {}, failed, again).decide()


class _Decider:
    def __init__(
        self,
        nodes: Iterable[Node],
        asked: Iterable[Asked],
        links: Mapping[tuple[str, str], Link],
        now: float,
        off: Collection[str],
        pending: Mapping[str, Load],
        failed: Collection[tuple[str, str]],
        again: Collection[str],
    ) -> None:
        self.links, self.off, self.failed, self.again = links, off, failed, again
        self.models = {each.model_id: each for each in asked if each.model_id not in off}
        self.seats = {
            node.node_id: _Seat(
                node,
                movable(node, now),
                [s for s in node.shards if s.state in HELD],
                memory_of(node),
                [pending[node.node_id]] if node.node_id in pending else [],
            )
            for node in sorted(nodes, key=lambda node: node.node_id)
            if node.routable(now) and node.probe.failures < PROBES_MISSED
        }
        self.busy = frozenset(pending)
        self.loads: list[Load] = []
        self.unloads: list[Unload] = []
        self.why: dict[str, tuple[str, ...]] = {}
        self.waiting: dict[str, str] = {}

    def decide(self) -> Decision:
        self._let_go()
        recent = sorted(
            self.models.values(), key=lambda each: (-max(each.asked_at, each.used_at), each.model_id)
        )
        for model in recent:
            if self._gaps(model) or model.model_id in self.again:
                self._place(model)
        for model in recent:
            if model.model_id not in self.waiting and self._idle(model):
                self._place(model)
        return Decision(tuple(self.loads), tuple(self.unloads), self.why, self.waiting)

    # ------------------------------------------------------------ what goes in any case

    def _let_go(self) -> None:
        """Shards of models that are off, and those that a larger shard on the same node stands for."""
        for seat in self.seats.values():
            if not seat.movable:
                continue
            for shard in list(seat.shards):
                if shard.model in self.off:
                    self._unload(seat, shard, f"{shard.model} is not to be served any more")
                    continue
                larger = next((s for s in seat.shards if _contains(s, shard) and s.usable), None)
                if larger is not None:
                    self._unload(
                        seat,
                        shard,
                        f"layers {larger.start_layer}-{larger.end_layer}, which have these, are loaded",
                    )

    def _unload(self, seat: _Seat, shard: Shard, why: str, *, evicts: bool = False) -> None:
        seat.shards.remove(shard)
        self.unloads.append(
            Unload(seat.node.node_id, shard.model, shard.start_layer, shard.end_layer, why, evicts)
        )

    # ------------------------------------------------------------ what is missing

    def _gaps(self, model: Asked) -> bool:
        covered = {
            layer
            for seat in self.seats.values()
            for first, last in seat.held(model.model_id)
            for layer in range(first, last + 1)
        }
        return len(covered) < model.file.n_layers

    def _idle(self, model: Asked) -> bool:
        """Whether some node that could hold layers of the model holds nothing at all."""
        return any(
            seat.movable
            and not seat.shards
            and not seat.coming
            and (seat.node.node_id, model.model_id) not in self.failed
            for seat in self.seats.values()
        )

    # ------------------------------------------------------------ placing one model

    def _place(self, model: Asked) -> None:
        freed: list[tuple[_Seat, Shard, bool]] = []
        layers = model_layers(model.file)
        while True:
            gone = {(id(seat), id(shard)) for seat, shard, _ in freed}
            try:
                placement = self._try(model, layers, gone)
                break
            except PlacementImpossible as error:
                more = self._victims(model, gone)
                if not more:
                    self.waiting[model.model_id] = error.detail
                    return
                freed += more
        for seat, shard, evicts in self._needed(model, layers, freed):
            if evicts:
                why = f"makes room for {model.model_id}: no other model was idle for so long"
            else:
                why = f"makes room for {model.model_id}; others hold these layers too"
            self._unload(seat, shard, why, evicts=evicts)
        self.why[model.model_id] = tuple(_named(line, self.seats) for line in placement.why)
        for node_id, ranges in placement.shards.items():
            seat = self.seats[node_id]
            if seat.movable and node_id not in self.busy:
                self._take(seat, model, ranges)

    def _try(self, model: Asked, layers: ModelLayers, gone: Collection[tuple[int, int]]) -> Placement:
        nodes = [self._node(seat, model, gone) for seat in self.seats.values()]
        nodes = [node for node in nodes if not node.pinned or node.shards]
        return place(layers, nodes, links=self.links)

    def _node(self, seat: _Seat, model: Asked, gone: Collection[tuple[int, int]]) -> PlacementNode:
        node, file = seat.node, model.file
        fixed = not seat.movable or (node.node_id, model.model_id) in self.failed
        room = seat.memory - compute_bytes(node, file)
        for shard in seat.shards:
            if shard.model != model.model_id and (id(seat), id(shard)) not in gone:
                room -= self._bytes(node, shard.model, shard.start_layer, shard.end_layer, shard.memory_bytes)
        for coming in seat.coming:
            if coming.model_id != model.model_id:
                room -= self._bytes(node, coming.model_id, coming.first, coming.last, 0)
        own = [s for s in seat.shards if s.model == model.model_id]
        return PlacementNode(
            node_id=node.node_id,
            memory_bytes=max(room, 0),
            decode_ms_per_layer=layer_ms(
                node, model.model_id, file, [each.node for each in self.seats.values()]
            ),
            output_ms=next((s.times.output_ms for s in own if s.is_tail and s.times.output_ms > 0), None),
            embed_ms=next((s.times.embed_ms for s in own if s.is_head and s.times.embed_ms > 0), None),
            shards=_merged(seat.held(model.model_id)),
            extra_bytes=kv_bytes(node, file),
            pinned=fixed,
        )

    def _bytes(self, node: Node, model_id: str, first: int, last: int, told: int) -> int:
        """What a shard takes: as its node says, or, while it is being loaded, as is to be expected."""
        known = self.models.get(model_id)
        if told or known is None:
            return told
        return shard_bytes(node, known.file, first, last)

    def _victims(self, model: Asked, gone: Collection[tuple[int, int]]) -> list[tuple[_Seat, Shard, bool]]:
        """What may go next to make room: a replica, else all of the model that is idle for the longest."""
        if not self._gaps(model):
            return []
        idle = sorted(
            (each for each in self.models.values() if each.model_id != model.model_id),
            key=lambda each: (max(each.used_at, each.asked_at), each.model_id),
        )
        for other in idle:
            for seat in self.seats.values():
                for shard in seat.shards:
                    left = (
                        seat.movable and shard.model == other.model_id and (id(seat), id(shard)) not in gone
                    )
                    if left and self._held_elsewhere(seat, shard, gone):
                        return [(seat, shard, False)]
        for other in idle:
            if max(other.used_at, other.asked_at) >= model.asked_at:
                continue
            found = [
                (seat, shard, True)
                for seat in self.seats.values()
                if seat.movable
                for shard in seat.shards
                if shard.model == other.model_id and (id(seat), id(shard)) not in gone
            ]
            if found:
                return found
        return []

    def _needed(
        self, model: Asked, layers: ModelLayers, freed: Sequence[tuple[_Seat, Shard, bool]]
    ) -> list[tuple[_Seat, Shard, bool]]:
        """Of what may go, what must: the rest stays."""
        needed = list(freed)
        for each in list(freed):
            rest = [other for other in needed if other is not each]
            whole = each[2] and any(other[2] and other[1].model == each[1].model for other in rest)
            if whole:
                continue
            try:
                self._try(model, layers, {(id(seat), id(shard)) for seat, shard, _ in rest})
            except PlacementImpossible:
                continue
            needed = rest
        return needed

    def _held_elsewhere(self, seat: _Seat, shard: Shard, gone: Collection[tuple[int, int]] = ()) -> bool:
        """Whether other nodes could go on without this shard: usable ones hold all of its layers."""
        others = {
            layer
            for each in self.seats.values()
            if each is not seat
            for s in each.shards
            if s.model == shard.model and s.usable and (id(each), id(s)) not in gone
            for layer in range(s.start_layer, s.end_layer + 1)
        }
        return others.issuperset(range(shard.start_layer, shard.end_layer + 1))

    def _take(self, seat: _Seat, model: Asked, ranges: Iterable[LayerRange]) -> None:
        """Has a node load what it is to hold and does not: whole runs, for a stage runs within one shard."""
        node = seat.node
        for first, last in _merged(ranges):
            held = seat.held(model.model_id)
            if any(a <= first and last <= b for a, b in held):
                continue
            taken = sum(
                self._bytes(node, s.model, s.start_layer, s.end_layer, s.memory_bytes)
                for s in node.shards
                if s.state in HELD
            )
            taken += sum(self._bytes(node, c.model_id, c.first, c.last, 0) for c in seat.coming)
            load = Load(node.node_id, model.model_id, first, last)
            if taken + shard_bytes(node, model.file, first, last) <= seat.memory:
                seat.coming.append(load)
                self.loads.append(load)
                continue
            if any(each.node_id == node.node_id for each in self.unloads):
                continue  # once that is done
            touching = [
                s
                for s in seat.shards
                if s.model == model.model_id and s.start_layer <= last + 1 and s.end_layer >= first - 1
            ]
            if touching and all(self._held_elsewhere(seat, s) for s in touching):
                for shard in touching:
                    self._unload(
                        seat, shard, f"makes room for layers {first}-{last}; others hold these layers too"
                    )
            elif touching:
                self.why[model.model_id] = (
                    *self.why[model.model_id],
                    f"{node.name} stays as it is: it has no room for layers {first}-{last} beside what "
                    "only it holds.",
                )


def _contains(larger: Shard, shard: Shard) -> bool:
    return (
        larger is not shard
        and larger.model == shard.model
        and larger.start_layer <= shard.start_layer
        and shard.end_layer <= larger.end_layer
        and (larger.start_layer, larger.end_layer) != (shard.start_layer, shard.end_layer)
    )


def _merged(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Ranges that touch or overlap as one."""
    return tuple(runs({layer for first, last in ranges for layer in range(first, last + 1)}))


def _named(line: str, seats: Mapping[str, _Seat]) -> str:
    """A sentence of the placement with the nodes' names in the place of their ids."""
    for node_id, seat in seats.items():
        line = line.replace(node_id, seat.node.name)
    return line


def placement_of(
    nodes: Iterable[Node],
    model: Asked,
    links: Mapping[tuple[str, str], Link],
    now: float,
    *,
    objective: Objective = "throughput",
    holders: int = 1,
    move_all: bool = False,
) -> Placement:
    """Where the model's layers should lie, as `decide` sees it. `move_all`: nodes with layers of their own
    are moved too, as in a dry run. Raises PlacementImpossible and ValueError."""
    decider = _Decider(nodes, [model], links, now, (), {}, (), ())
    found = [decider._node(seat, model, ()) for seat in decider.seats.values()]
    if move_all:
        found = [replace(node, pinned=False) for node in found]
    found = [node for node in found if not node.pinned or node.shards]
    return place(model_layers(model.file), found, links=links, objective=objective, holders=holders)
