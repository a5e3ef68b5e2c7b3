"""Whether a node can be reached where it says: dialled at its join, and again while it cannot be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from urllib.parse import urlsplit

from meshnet.tracker.members import Node
from meshnet.tracker.signals import Dial, Dialled, Effect, Say, State, TellNotice
from meshnet.tracker.telling import Step, put

DIAL_S = 4.0
AGAIN_S = 10.0


def first_dial(node: Node) -> Dial:
    """What is to be dialled of a node that has just joined."""
    assert node.connection is not None
    return Dial(node.node_id, node.connection, (_authority(node.http_url), node.grpc_address))


def due_dials(state: State, now: float) -> Step:
    """Nodes that could not be reached are tried again."""
    due = [
        node
        for node in state.nodes.values()
        if node.connection is not None and node.dial_at and now >= node.dial_at
    ]
    if not due:
        return state, ()
    waiting = (replace(node, dial_at=0.0) for node in due)
    return put(state, *waiting), tuple(first_dial(node) for node in due)


def dialled(state: State, event: Dialled, now: float) -> Step:
    """Keeps what could not be reached, and says so once, to people and to the node itself."""
    node = state.nodes.get(event.node_id)
    if node is None or node.connection != event.connection:
        return state, ()
    unreachable = dict(event.unreachable)
    after = replace(
        node, unreachable=tuple(unreachable.items()), dial_at=now + AGAIN_S if unreachable else 0.0
    )
    effects: list[Effect] = []
    for address, reason in unreachable.items():
        if address not in dict(node.unreachable):
            text = f"the tracker cannot reach {node.name} at {address}: {reason}"
            effects.append(Say("node unreachable", node.node_id, text, level="warning"))
            effects.append(TellNotice(event.connection, text, remedy(address)))
    if node.unreachable and not unreachable:
        effects.append(Say("node reachable", node.node_id, f"node reachable {node.name}"))
    return put(state, after), tuple(effects)


def remedy(address: str) -> str:
    """What helps where an address cannot be reached."""
    port = address.rpartition(":")[2]
    return (
        f"open TCP port {port} in that machine's firewall (for instance: sudo ufw allow {port}/tcp), or "
        "start its node with --advertise and the address under which it can be reached"
    )


def unreached(node: Node) -> list[str]:
    """The problems of a node, with remedies."""
    return [
        f"the tracker cannot reach {node.name} at {address}: {reason}; {remedy(address)}"
        for address, reason in node.unreachable
    ]


def link_problems(state: State, node: Node) -> list[str]:
    """What the node and its neighbours report of each other."""
    found = []
    for (source, target), link in state.links.items():
        if not link.error or node.node_id not in (source, target):
            continue
        near, far = state.nodes.get(source), state.nodes.get(target)
        if near is not None and far is not None and near.connected and far.connected:
            found.append(f"{link_line(near, far, link.error)}; {remedy(far.grpc_address)}")
    return found


def link_line(near: Node, far: Node, error: str) -> str:
    """What a node reports of a neighbour, with names for ids."""
    where, _, reason = error.removeprefix(f"cannot reach {far.node_id} at ").partition(": ")
    if where == error or not reason:
        where, reason = far.grpc_address, error
    return f"node {near.name} cannot reach {far.name} at {where}: {reason}"


async def dial(asked: Dial) -> tuple[tuple[str, str], ...]:
    """(address, reason) of what does not take a connection."""
    reasons = await asyncio.gather(*(_reason(address) for address in asked.addresses))
    return tuple(
        (address, reason) for address, reason in zip(asked.addresses, reasons, strict=True) if reason
    )


async def _reason(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {DIAL_S:.0f} s"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    writer.transport.abort()
    return ""


def _authority(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
