"""What nodes are told and asked after the mesh has changed: cuts, peers, probes. Part of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshnet.tracker.catalogue import borders, missing_cuts, wanted_cuts
from meshnet.tracker.members import Node
from meshnet.tracker.signals import Effect, Probe, State, TellCuts, TellPeers

MAX_PEERS = 64

Step = tuple[State, tuple[Effect, ...]]


def put(state: State, *nodes: Node) -> State:
    """The state with these nodes in the place of what was known of them."""
    return replace(state, nodes=MappingProxyType({**state.nodes, **{node.node_id: node for node in nodes}}))


def due_probes(node: Node, now: float) -> tuple[list[Effect], Node]:
    """At most one probe at a time per node: of the first model with a loaded shard that is not proven."""
    if node.probe.running or now < node.probe.next_at or node.connection is None:
        return [], node
    for shard in node.shards:
        if shard.state == "ready" and not shard.probed:
            probe = Probe(node.node_id, node.boot_id, node.grpc_address, shard.model)
            return [probe], replace(node, probe=replace(node.probe, running=True, next_at=0.0))
    return [], node


def settle(state: State, effects: list[Effect], now: float) -> Step:
    """After nodes or shards changed: tells cuts and peers to those whose view changed, and starts probes."""
    connected = [node for node in state.nodes.values() if node.connected]
    mine = [node for node in connected if node.connection is not None]
    models = {shard.model for node in connected for shard in node.shards}
    by_model = {model: borders(connected, model) for model in models}
    changed: list[Node] = []
    for node in mine:
        after, more = _tell_cuts(node, by_model)
        after, peers = _tell_peers(after, connected)
        asked, after = due_probes(after, now)
        effects += [*more, *peers, *asked]
        if after is not node:
            changed.append(after)
    return put(state, *changed) if changed else state, tuple(effects)


def _tell_cuts(node: Node, by_model: Mapping[str, tuple[int, ...]]) -> tuple[Node, list[Effect]]:
    effects: list[Effect] = []
    assert node.connection is not None
    sent = dict(node.cuts_sent)
    for model in sorted({shard.model for shard in node.shards}):
        cuts = wanted_cuts(node, model, by_model[model])
        if missing_cuts(node, model, cuts) and node.cuts_sent.get(model) != cuts:
            sent[model] = cuts
            effects.append(TellCuts(node.connection, model, cuts))
    return (replace(node, cuts_sent=MappingProxyType(sent)) if effects else node), effects


def _tell_peers(node: Node, connected: list[Node]) -> tuple[Node, list[Effect]]:
    assert node.connection is not None
    mine = {shard.model for shard in node.shards}
    peers = tuple(
        sorted(
            (other.node_id, other.grpc_address)
            for other in connected
            if other.node_id != node.node_id and any(shard.model in mine for shard in other.shards)
        )[:MAX_PEERS]
    )
    if peers == node.peers_sent:
        return node, []
    return replace(node, peers_sent=peers), [TellPeers(node.connection, peers)]
