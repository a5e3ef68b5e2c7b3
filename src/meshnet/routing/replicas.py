"""What nodes hold beside the pipeline: what they keep, and replicas of what is scarce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshnet.routing.errors import layer_text
from meshnet.routing.layout import Grid, Layout


@dataclass(frozen=True, slots=True)
class Holdings:
    """Per node (by index) its layers, and sentences on what was kept, dropped and replicated."""

    layers: list[set[int]]
    notes: list[tuple[int, str]]


def replicate(grid: Grid, layout: Layout, before: Sequence[set[int]], holders: int) -> Holdings:
    """Gives every node its stage, what it holds already and can keep, and replicas.

    Nodes that would hold nothing take the scarcest stage, and its neighbours while those are as scarce or the
    time of the slowest stage is not exceeded. A stage is as scarce as its scarcest layer: fewest holders
    first, then the least speed of its holders together. Then layers with fewer than `holders` holders go to
    nodes that have room for them, the fastest first.
    """
    return _Replication(grid, layout, before).run(holders)


class _Replication:
    def __init__(self, grid: Grid, layout: Layout, before: Sequence[set[int]]) -> None:
        self.grid = grid
        self.stages = [range(first, last + 1) for _, first, last in layout.stages]
        self.slowest = max(grid.stage_units(*part) for part in layout.stages)
        self.layers: list[set[int]] = [set() for _ in before]
        self.notes: list[tuple[int, str]] = []
        for node, first, last in layout.stages:
            self.layers[node] |= set(range(first, last + 1))
        self.speed = [grid.layers / max(sum(units), 1) for units in grid.layer_units]
        self.count = [0] * grid.layers
        self.rate = [0.0] * grid.layers
        for node, layers in enumerate(self.layers):
            self._count(node, layers)
        for node, held in enumerate(before):
            self._keep(node, held)

    def run(self, holders: int) -> Holdings:
        order = sorted(range(len(self.layers)), key=lambda node: (-self.speed[node], node))
        for node in order:
            if not self.layers[node]:
                self._replicate_on(node)
        stuck: set[int] = set()
        while True:
            rare = [layer for layer, count in enumerate(self.count) if count < holders and layer not in stuck]
            if not rare:
                return Holdings(self.layers, self.notes)
            layer = min(rare, key=self._scarcity)
            stage = next(stage for stage in self.stages if layer in stage)
            wanted = [other for other in stage if self.count[other] < holders]
            able = [n for n in order if layer not in self.layers[n] and self._fits(n, {layer})]
            if able:
                self._take(able[0], self._grown(able[0], layer, wanted), f"up to {holders} holders each")
            else:
                stuck.add(layer)

    def _scarcity(self, layer: int) -> tuple[int, float, int]:
        return self.count[layer], self.rate[layer], layer

    def _count(self, node: int, layers: Collection[int]) -> None:
        for layer in layers:
            self.count[layer] += 1
            self.rate[layer] += self.speed[node]

    def _fits(self, node: int, more: set[int]) -> bool:
        return self.grid.may_hold(node, self.layers[node] | more)

    def _keep(self, node: int, held: set[int]) -> None:
        """Keeps what the node holds already, nearest to its stage first, as far as it fits."""
        extra = held - self.layers[node]
        centre = self.layers[node] or held
        kept: set[int] = set()
        for layer in sorted(extra, key=lambda layer: (min(abs(layer - own) for own in centre), layer)):
            if self._fits(node, kept | {layer}):
                kept.add(layer)
        if kept:
            self.layers[node] |= kept
            self._count(node, kept)
            self.notes.append((node, f"keeps {layer_text(kept)}, which it holds already."))
        if extra - kept:
            self.notes.append((node, f"lets go of {layer_text(extra - kept)}: no room beside the rest."))

    def _replicate_on(self, node: int) -> None:
        """The scarcest stage that fits, or as much as fits of it, and neighbours that are as scarce."""
        ranked = sorted(self.stages, key=lambda stage: min(map(self._scarcity, stage)))
        for stage in ranked:
            layer = next((x for x in sorted(stage, key=self._scarcity) if self._fits(node, {x})), None)
            if layer is None:
                continue
            taken = self._grown(node, layer, stage)
            fewest = min(self.count)
            if taken == set(stage):
                place = self.stages.index(stage)
                for neighbours in (self.stages[place + 1 :], self.stages[:place][::-1]):
                    for neighbour in neighbours:
                        more = taken | set(neighbour)
                        scarce = min(self.count[layer] for layer in neighbour) == fewest
                        quick = self.grid.stage_units(node, min(more), max(more)) <= self.slowest
                        if not self._fits(node, more) or not (scarce or quick):
                            break
                        taken = more
            self._take(
                node, taken, f"until now {fewest} node{'s' if fewest > 1 else ''} held the scarcest of them"
            )
            return
        self.notes.append((node, "has no room for a layer."))

    def _grown(self, node: int, layer: int, wanted: Collection[int]) -> set[int]:
        """`layer` and what adjoins it in `wanted`, first upwards, then downwards, as far as it fits."""
        taken = {layer}
        for step in (1, -1):
            following = layer + step
            while following in wanted and self._fits(node, taken | {following}):
                taken.add(following)
                following += step
        return taken

    def _take(self, node: int, layers: set[int], reason: str) -> None:
        new = layers - self.layers[node]
        self.layers[node] |= new
        self._count(node, new)
        self.notes.append((node, f"replicates {layer_text(new)}: {reason}."))
