"""Membership as a state machine: (state, event, now) -> (state, effects). No sockets, no clock, no storage.

Whoever owns the streams authenticates a join first, then feeds events in and carries the effects out. `now`
is in seconds of one monotonic clock, `now_ms` in an event unix milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshnet.tracker.catalogue import known_fingerprint
from meshnet.tracker.dialling import dialled, due_dials, first_dial, link_line, remedy
from meshnet.tracker.members import Node, ProbeWork, Shard
from meshnet.tracker.signals import (
    Beat,
    CloseStream,
    Dialled,
    DrainSet,
    Effect,
    Event,
    Gone,
    Joined,
    LinksMeasured,
    PeerSaid,
    Probed,
    Refuse,
    Rules,
    Say,
    ShardsChanged,
    State,
    StreamEnded,
    TellDrain,
    TellNotice,
    TellServing,
    Tick,
    Welcome,
)
from meshnet.tracker.telling import Step, due_probes, put, settle

PROBE_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
FORGET_LOST_S = 3_600.0
MAX_NODES = 10_000
MAX_LINKS = 64
PEER_LEASES = 3
"""What another tracker tells comes by way of the database, and later."""


def step(state: State, event: Event, now: float) -> Step:
    """What an event does. Events of streams that a node is no longer on change nothing."""
    match event:
        case Joined():
            return _joined(state, event, now)
        case Beat():
            return _beat(state, event, now)
        case ShardsChanged():
            return _shards(state, event, now)
        case LinksMeasured():
            return _links(state, event)
        case StreamEnded():
            return _ended(state, event, now)
        case Probed():
            return _probed(state, event, now)
        case Dialled():
            return dialled(state, event, now)
        case DrainSet():
            return _drain(state, event)
        case PeerSaid():
            return _peer_said(state, event, now)
        case Tick():
            return _tick(state, now)


def _current(state: State, node_id: str, connection: int) -> Node | None:
    node = state.nodes.get(node_id)
    return node if node is not None and node.connection == connection else None


def unique_name(wanted: str, node_id: str, nodes: Mapping[str, Node]) -> str:
    """The name itself, or with the first free suffix -2, -3, ... when another node has it (ignoring case)."""
    taken = {node.name.lower() for node in nodes.values() if node.node_id != node_id}
    base = wanted.strip() or node_id
    name, number = base, 1
    while name.lower() in taken:
        number += 1
        name = f"{base}-{number}"
    return name


def conflict(state: State, node_id: str, shards: tuple[Shard, ...]) -> tuple[str, str, str] | None:
    """(code, message, remedy) when shards cannot be taken in."""
    seen: dict[str, str] = {}
    for shard in shards:
        if shard.model_layers < 1 or not 0 <= shard.start_layer <= shard.end_layer < shard.model_layers:
            return (
                "layers",
                f"layers {shard.start_layer}-{shard.end_layer} of {shard.model!r} do not lie in "
                f"0-{shard.model_layers - 1}",
                "start the node with --layers within the model",
            )
        known = known_fingerprint(state.nodes.values(), shard.model, but=node_id)
        other = known[1].name if known else node_id
        fingerprint = known[0] if known else seen.get(shard.model, shard.fingerprint)
        seen[shard.model] = shard.fingerprint
        if fingerprint != shard.fingerprint:
            return (
                "fingerprint",
                f"model {shard.model!r} has the fingerprint {shard.fingerprint[:16]} here and "
                f"{fingerprint[:16]} on node {other!r}: the files differ",
                f"use the same file as {other!r}, or give this one a model id of its own",
            )
    return None


def _joined(state: State, event: Joined, now: float) -> Step:
    old = state.nodes.get(event.node_id)
    if old is None and len(state.nodes) >= MAX_NODES:
        message = f"the mesh has {MAX_NODES} nodes, the most that a tracker takes"
        return state, (Refuse(event.connection, "full", message, "remove nodes", retry=True),)
    taken = old if old is not None and old.connected and old.boot_id != event.boot_id else None
    if taken is not None and now - taken.seen_at < state.rules.lease_s:
        # The older process keeps the id while it lives.
        message = f"another process is in the mesh as node {event.node_id!r} ({taken.http_url})"
        remedy = "give this one a data folder of its own (--data), or stop the other"
        return state, (Refuse(event.connection, "duplicate_node", message, remedy, retry=True),)
    if problem := conflict(state, event.node_id, event.shards):
        code, message, remedy = problem
        return state, (Refuse(event.connection, code, message, remedy),)
    effects: list[Effect] = []
    if old is not None and old.connection is not None and old.connection != event.connection:
        effects.append(CloseStream(old.connection))
        if old.boot_id != event.boot_id:
            effects.append(Gone(old.node_id, "it was started anew"))
    same_process = old is not None and old.boot_id == event.boot_id
    known = () if old is None else old.shards
    shards = _carry_cards(known, _carry_probes(known, event.shards) if same_process else event.shards)
    losses = _recent(old.losses, now, state.rules) if old is not None else ()
    pause = _pause(len(losses), state.rules) if old is not None and old.connection is None else 0.0
    node = Node(
        node_id=event.node_id,
        name=unique_name(event.name, event.node_id, state.nodes),
        boot_id=event.boot_id,
        connection=event.connection,
        http_url=event.http_url.rstrip("/"),
        grpc_address=event.grpc_address,
        hardware=event.hardware,
        shards=shards,
        numerics_class=event.numerics_class,
        memory_limit_bytes=event.memory_limit_bytes,
        memory_free_bytes=event.memory_free_bytes,
        meshnet_version=event.meshnet_version,
        engine_version=event.engine_version,
        placement_wanted=event.placement_wanted,
        labels=MappingProxyType(dict(event.labels)),
        n_slots=event.n_slots,
        n_ctx=event.n_ctx,
        reserved_bytes=event.reserved_bytes,
        read_bytes_per_s=event.read_bytes_per_s,
        joined_ms=old.joined_ms if old is not None else event.now_ms,
        seen_ms=event.now_ms,
        seen_at=now,
        progress_at=now,
        # A drain that was asked of the tracker outlives the node's process; it ends by undrain only.
        draining=old.draining if old is not None else False,
        drain_reason=old.drain_reason if old is not None else "",
        losses=losses,
        aside_until=now + pause,
    )
    layers = ", ".join(f"{s.start_layer}-{s.end_layer} of {s.model}" for s in shards) or "no layers yet"
    effects += [
        Welcome(event.connection, node.node_id, node.name),
        Say("node joined", node.node_id, f"node joined {node.name} layers {layers}"),
    ]
    effects.append(first_dial(node))
    if node.draining:
        effects.append(TellDrain(event.connection, True, node.drain_reason))
    if pause:
        effects.append(
            Say(
                "node set aside",
                node.node_id,
                f"node set aside {node.name} for {pause:.0f} s",
                level="warning",
            )
        )
    return settle(put(state, node), effects, now)


def _carry_cards(old: tuple[Shard, ...], new: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """Keeps what a head told of its model while it loads again: its names must not vanish meanwhile."""
    cards = {(shard.model, shard.fingerprint): shard.card for shard in old if shard.card is not None}
    return tuple(
        shard if shard.card is not None else replace(shard, card=cards.get((shard.model, shard.fingerprint)))
        for shard in new
    )


def _carry_probes(old: tuple[Shard, ...], new: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """Keeps what is proven and what the last heartbeat said of shards whose load did not change."""
    result = []
    for shard in new:
        before = next((item for item in old if item.same_load(shard)), None)
        result.append(shard if before is None else replace(shard, probed=before.probed))
    return tuple(result)


def _recent(losses: tuple[float, ...], now: float, rules: Rules) -> tuple[float, ...]:
    return tuple(at for at in losses if now - at < rules.flap_window_s)


def _pause(losses: int, rules: Rules) -> float:
    """Seconds that a returning node waits: none for the first losses, then doubling up to a limit."""
    extra = losses - rules.flap_free
    return 0.0 if extra <= 0 else min(rules.flap_pause_max_s, rules.flap_pause_s * 2.0 ** min(extra - 1, 20))


def _beat(state: State, event: Beat, now: float) -> Step:
    node = _current(state, event.node_id, event.connection)
    if node is None:
        return state, ()
    beats = {(beat.model, beat.start_layer, beat.end_layer): beat for beat in event.shards}
    shards = []
    for shard in node.shards:
        beat = beats.get((shard.model, shard.start_layer, shard.end_layer))
        if beat is not None:
            shard = replace(
                shard,
                free_slots=min(beat.free_slots, shard.n_slots),
                free_kv_tokens=beat.free_kv_tokens,
                queue_ms=beat.queue_ms,
                times=beat.times,
                healthy=beat.ready,
                sessions=beat.sessions[: shard.n_slots],
            )
        shards.append(shard)
    moved = event.progress != node.progress or event.waiting_steps == 0
    progress_at = now if moved else node.progress_at
    wedged = (
        event.waiting_steps > 0
        and now - progress_at >= state.rules.wedge_s
        and event.oldest_step_ms >= state.rules.wedge_s * 1000
    )
    after = replace(
        node,
        shards=tuple(shards),
        seen_ms=event.now_ms,
        seen_at=now,
        latency_ms=event.latency_ms,
        current_load=event.current_load,
        served_requests=event.served_requests,
        failed_requests=event.failed_requests,
        progress=event.progress,
        progress_at=progress_at,
        waiting_steps=event.waiting_steps,
        oldest_step_ms=event.oldest_step_ms,
        memory_free_bytes=event.memory_free_bytes,
        on_battery=event.on_battery,
        resting=event.resting,
        wedged=wedged,
    )
    effects: list[Effect] = []
    if wedged and not node.wedged:
        effects.append(Gone(node.node_id, "its engine is wedged: no step completes"))
        effects.append(Say("node wedged", node.node_id, f"node wedged {node.name}", level="warning"))
    elif node.wedged and not wedged:
        # It must prove itself again before it gets calls.
        after = after.with_shards(tuple(replace(shard, probed=False) for shard in after.shards))
        effects.append(Say("node recovered", node.node_id, f"node recovered {node.name}"))
    asked, after = due_probes(after, now)
    return put(state, after), (*effects, *asked)


def _shards(state: State, event: ShardsChanged, now: float) -> Step:
    node = _current(state, event.node_id, event.connection)
    if node is None:
        return state, ()
    if problem := conflict(state, node.node_id, event.shards):
        code, message, remedy = problem
        state, effects = _lose(state, node, f"it was refused: {message}", now, count=False)
        return state, (Refuse(event.connection, code, message, remedy), *effects)
    after = node.with_shards(_carry_cards(node.shards, _carry_probes(node.shards, event.shards)))
    return settle(put(state, after), [], now)


def _links(state: State, event: LinksMeasured) -> Step:
    node = _current(state, event.node_id, event.connection)
    if node is None:
        return state, ()
    links = {pair: link for pair, link in state.links.items() if pair[0] != node.node_id}
    effects: list[Effect] = []
    for peer, link in sorted(event.links.items())[:MAX_LINKS]:
        other = state.nodes.get(peer)
        if other is None:
            continue
        links[node.node_id, peer] = link
        before = state.links.get((node.node_id, peer))
        if link.error and (before is None or before.error != link.error):
            line = link_line(node, other, link.error)
            effects.append(Say("link broken", node.node_id, line, level="warning"))
            if other.connection is not None:
                effects.append(TellNotice(other.connection, line, remedy(other.grpc_address)))
    return replace(state, links=MappingProxyType(links)), tuple(effects)


def _ended(state: State, event: StreamEnded, now: float) -> Step:
    node = _current(state, event.node_id, event.connection)
    if node is None:
        return state, ()
    return _lose(state, node, event.reason, now, count=not event.leaving)


def _lose(state: State, node: Node, reason: str, now: float, *, count: bool) -> Step:
    losses = (*_recent(node.losses, now, state.rules), now) if count else node.losses
    after = replace(
        node,
        connection=None,
        via="",
        losses=losses[-64:],
        lost_reason=reason,
        lost_at=now,
        wedged=False,
        probe=ProbeWork(),
        cuts_sent={},
        peers_sent=(),
    )
    said = Say(
        "node lost", node.node_id, f"node lost {node.name}: {reason}", level="warning" if count else "info"
    )
    return settle(put(state, after), [Gone(node.node_id, reason), said], now)


def _probed(state: State, event: Probed, now: float) -> Step:
    node = state.nodes.get(event.node_id)
    if node is None or node.boot_id != event.boot_id or not node.connected:
        return state, ()
    if event.error:
        failures = node.probe.failures + 1
        pause = PROBE_PAUSES_S[min(failures, len(PROBE_PAUSES_S)) - 1]
        after = replace(node, probe=ProbeWork(False, failures, now + pause, event.error))
        line = f"node {node.name} did not answer the probe: {event.error}; next try in {pause:.0f} s"
        return put(state, after), (Say("probe failed", node.node_id, line, level="warning"),)
    shards = tuple(
        replace(shard, probed=True) if shard.model == event.model and shard.state == "ready" else shard
        for shard in node.shards
    )
    # What answers a probe is reached: what was said of it before is looked at again.
    again = now if node.unreachable else node.dial_at
    after = replace(node, shards=shards, probe=ProbeWork(), dial_at=again)
    asked, after = due_probes(after, now)
    said: tuple[Effect, ...] = ()
    if node.connection is not None:
        said = (TellServing(node.connection, event.model),)
    if after.status(now) == "ready" and node.status(now) != "ready":
        said = (*said, Say("node ready", node.node_id, f"node ready {node.name}"))
    return put(state, after), (*asked, *said)


def _drain(state: State, event: DrainSet) -> Step:
    node = state.nodes.get(event.node_id)
    if node is None or node.draining == event.on:
        return state, ()
    after = replace(node, draining=event.on, drain_reason=event.reason if event.on else "")
    what = "draining" if event.on else "taken back"
    effects: list[Effect] = [Say(f"node {what}", node.node_id, f"node {what} {node.name}")]
    if node.connection is not None:
        effects.append(TellDrain(node.connection, event.on, event.reason))
    return put(state, after), tuple(effects)


def _tick(state: State, now: float) -> Step:
    effects: list[Effect] = []
    for node in list(state.nodes.values()):
        if node.via and now - node.seen_at >= PEER_LEASES * state.rules.lease_s:
            state, more = _lose(state, node, "its tracker told nothing new of it", now, count=False)
            effects += more
        elif node.connection is not None and now - node.seen_at >= state.rules.lease_s:
            silent = f"no heartbeat for {now - node.seen_at:.1f} s"
            state, more = _lose(state, node, silent, now, count=True)
            effects += [CloseStream(node.connection), *more]
        elif node.connection is not None and node.probe.next_at and now >= node.probe.next_at:
            asked, after = due_probes(node, now)
            state = put(state, after)
            effects += asked
        elif not node.connected and now - node.lost_at >= FORGET_LOST_S and not node.draining:
            kept = {key: value for key, value in state.nodes.items() if key != node.node_id}
            links = {pair: link for pair, link in state.links.items() if node.node_id not in pair}
            state = replace(state, nodes=MappingProxyType(kept), links=MappingProxyType(links))
            effects.append(Say("node forgotten", node.node_id, f"node forgotten {node.name}"))
    state, dials = due_dials(state, now)
    return state, (*effects, *dials)


def _peer_said(state: State, event: PeerSaid, now: float) -> Step:
    """Takes another tracker's nodes as they are told; nodes on streams of our own are ours to know."""
    effects: list[Effect] = []
    told = {node.node_id: node for node in event.nodes}
    changed: list[Node] = []
    for node_id, node in told.items():
        before = state.nodes.get(node_id)
        if before is not None and before.connection is not None:
            continue
        draining = before is not None and before.draining
        changed.append(
            replace(node, connection=None, via=event.tracker_id, draining=draining or node.draining)
        )
        if before is None or not before.connected:
            effects.append(Say("node joined", node_id, f"node joined {node.name} at another tracker"))
        elif node.wedged and not before.wedged:
            effects.append(Gone(node_id, "its engine is wedged: no step completes"))
    settled = put(state, *changed) if changed else state
    for before in list(state.nodes.values()):
        if before.via == event.tracker_id and before.node_id not in told:
            settled, more = _lose(settled, before, "it left another tracker", now, count=False)
            effects += more
    membership = {n.node_id for n in state.nodes.values() if n.via} != {
        n.node_id for n in settled.nodes.values() if n.via
    }
    return settle(settled, effects, now) if membership else (settled, tuple(effects))
