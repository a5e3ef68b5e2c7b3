"""Dry runs of a placement: which node should hold which layers of a model, from what the mesh measured."""

from __future__ import annotations

from statistics import median
from typing import Any

from meshnet.protocol.errors import ApiError
from meshnet.routing import Link
from meshnet.routing.placement import ModelLayers, PlacementImpossible, PlacementNode, place
from meshnet.tracker.catalogue import holders
from meshnet.tracker.forms import PlaceForm
from meshnet.tracker.members import Node, Shard
from meshnet.tracker.previews import find_model
from meshnet.tracker.roster import Roster
from meshnet.tracker.shelf import Shelf

MIN_MS = 1e-6


def preview_placement(shelf: Shelf, roster: Roster, form: PlaceForm) -> dict[str, Any]:
    """The placement as docs/routing.md describes it. Raises ApiError: 400, 404, or 409 when nothing fits.

    Bytes per layer are what the nodes that hold the model's shards report for them, KV room included; a node
    that holds none of it is taken to be as fast per layer as the slowest holder.
    """
    model_id = find_model(shelf, form.model)
    held = list(holders(roster.state.nodes.values(), model_id))
    if not held:
        raise ApiError(409, f"no live node holds layers of {model_id!r}", code="unknown_size", param="model")
    layers = held[0][1].model_layers
    layer_bytes = int(median(s.memory_bytes / (s.end_layer - s.start_layer + 1) for _, s in held))
    nodes = [
        _node(node, [shard for holder, shard in held if holder.node_id == node.node_id], held)
        for node in _wanted(roster, form)
    ]
    links = {
        pair: Link(link.ms, link.bytes_per_s or 1.0)
        for pair, link in roster.state.links.items()
        if not link.error
    }
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
