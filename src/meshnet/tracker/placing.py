"""Dry runs of a placement: which node should hold which layers of a model, from what the mesh measured."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from meshnet.models.gguf import ModelFile
from meshnet.protocol.errors import ApiError
from meshnet.routing.placement import ModelLayers, PlacementImpossible, PlacementNode, place
from meshnet.tracker.allocation import Asked, placement_of
from meshnet.tracker.catalogue import holders
from meshnet.tracker.forms import PlaceForm
from meshnet.tracker.members import Node, Shard
from meshnet.tracker.previews import find_model
from meshnet.tracker.roster import Roster
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.weighing import MIN_MS, known_links


def preview_placement(
    shelf: Shelf, roster: Roster, form: PlaceForm, model_of: Callable[[str], ModelFile | None]
) -> dict[str, Any]:
    """The placement as docs/routing.md describes it. Raises ApiError: 400, 404, or 409 when nothing fits.

    `model_of` gives the description of a model by its fingerprint, where the tracker knows it. Where not,
    bytes per layer are what the nodes that hold the model's shards report for them, KV room included, and a
    node that holds none of it is taken to be as fast per layer as the slowest holder.
    """
    model_id = find_model(shelf, form.model)
    fingerprint = shelf.models()[model_id].fingerprint
    file = model_of(fingerprint)
    if file is not None:
        return {"model": model_id, **_described(roster, form, Asked(model_id, fingerprint, file))}
    held = list(holders(roster.state.nodes.values(), model_id))
    if not held:
        raise ApiError(409, f"no live node holds layers of {model_id!r}", code="unknown_size", param="model")
    layers = held[0][1].model_layers
    layer_bytes = int(median(s.memory_bytes / (s.end_layer - s.start_layer + 1) for _, s in held))
    nodes = [
        _node(node, [shard for holder, shard in held if holder.node_id == node.node_id], held)
        for node in _wanted(roster, form)
    ]
    links = known_links(roster.state.links)
    try:
        found = place(
            ModelLayers(layer_bytes=(layer_bytes,) * layers),
            nodes,
            links=links,
            objective=form.objective,
            holders=form.holders,
        )
    except PlacementImpossible as error:
        raise ApiError(409, error.detail, code="does_not_fit") from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    return {"model": model_id, **found.to_dict()}


def _described(roster: Roster, form: PlaceForm, model: Asked) -> dict[str, Any]:
    try:
        found = placement_of(
            _wanted(roster, form),
            model,
            known_links(roster.state.links),
            roster.clock(),
            objective=form.objective,
            holders=form.holders,
            move_all=True,
        )
    except PlacementImpossible as error:
        raise ApiError(409, error.detail, code="does_not_fit") from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    return found.to_dict()


def _wanted(roster: Roster, form: PlaceForm) -> list[Node]:
    if not form.nodes:
        return [node for node in roster.state.nodes.values() if node.routable(roster.clock())]
    nodes: dict[str, Node] = {}
    for name in form.nodes:
        node = roster.find(name)
        if node is None:
            raise ApiError(404, f"there is no node {name[:100]!r}", code="unknown_node", param="nodes")
        nodes[node.node_id] = node
    return list(nodes.values())


def _node(node: Node, mine: list[Shard], held: list[tuple[Node, Shard]]) -> PlacementNode:
    slowest = max(shard.times.decode_ms_per_layer for _, shard in held)
    per_layer = max((shard.times.decode_ms_per_layer for shard in mine), default=slowest)
    return PlacementNode(
        node_id=node.node_id,
        memory_bytes=node.memory_limit_bytes or node.hardware.memory_bytes,
        decode_ms_per_layer=max(per_layer, MIN_MS),
        output_ms=next((shard.times.output_ms for shard in mine if shard.is_tail), None),
        embed_ms=next((shard.times.embed_ms for shard in mine if shard.is_head), None),
        prefill_ms_per_token_layer=max((s.times.prefill_ms_per_token_layer for s in mine), default=0.0),
        shards=tuple(sorted({(shard.start_layer, shard.end_layer) for shard in mine})),
    )
