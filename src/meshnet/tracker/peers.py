"""Several trackers on one database: each tells the others its nodes and calls, and uses theirs as its own.

A tracker publishes what it holds with its beat in the books, once a second, and reads what the others
published. Their nodes enter the registry as members `via` that tracker: they are routed over like any other,
while probes, directives and heartbeats stay with the tracker that holds the stream. A node is the authority
over its own slots, so that two trackers that count on the same slot are told apart by the node's refusal.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import structlog

from meshnet.protocol.keys import TRACKER_NAME
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import BooksError
from meshnet.tracker.feed import CALL_INTERVAL_S, Audience, Feed
from meshnet.tracker.live import LiveTable
from meshnet.tracker.members import Card, Node, ProbeWork, Shard
from meshnet.tracker.roster import Roster
from meshnet.tracker.signals import DrainSet, PeerSaid

EXCHANGE_S = 1.0
MAX_CALLS = 200
MAX_ENDED = 50
MAX_BYTES = 900_000
FORWARD_S = 5.0
DRAINS = "drained_nodes"

log = structlog.get_logger("meshnet.peers")


class Told(msgspec.Struct):
    """What a tracker publishes. Chat templates are long and equal: they stand once, by fingerprint."""

    http_url: str = ""
    nodes: list[Node] = []
    templates: dict[str, str] = {}
    calls: list[tuple[int, dict[str, Any]]] = []
    """(key id, view) of calls in flight and of the last ended."""


class PeerTrackers:
    """The other trackers of the mesh, as this one sees them."""

    def __init__(
        self,
        books: Books,
        roster: Roster,
        table: LiveTable,
        feed: Feed,
        own_url: str,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`context`: for trackers that speak TLS, all under one name."""
        self._books = books
        self._roster = roster
        self._table = table
        self._feed = feed
        self._own_url = own_url
        self._context = context
        self._calls: dict[str, tuple[str, int, dict[str, Any]]] = {}
        self._urls: dict[str, str] = {}
        self._known: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FORWARD_S))
        self._task = asyncio.create_task(self._exchange(), name="peer-trackers")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def others(self) -> list[str]:
        """Where the other trackers are."""
        return sorted(self._urls.values())

    def all_urls(self) -> list[str]:
        """Where this tracker and the others are, this one first."""
        return [self._own_url, *self.others()]

    # ------------------------------------------------------------ calls elsewhere

    def calls(self) -> list[tuple[int, dict[str, Any]]]:
        """(key id, view) of calls at other trackers, in flight first."""
        shown = sorted(
            self._calls.values(), key=lambda item: (item[2]["ended_ms"] is not None, item[2]["accepted_ms"])
        )
        return [(key_id, view) for _, key_id, view in shown]

    def call(self, call_id: str) -> tuple[int, dict[str, Any]] | None:
        found = self._calls.get(call_id)
        return None if found is None else (found[1], found[2])

    async def forward(self, call_id: str, method: str, authorization: str) -> tuple[int, Any] | None:
        """The status and the value that the tracker which runs a call answers.

        None when nobody knows the call or its tracker does not answer.
        """
        found = self._calls.get(call_id)
        url = self._urls.get(found[0]) if found is not None else None
        if url is None or self._session is None:
            return None
        try:
            async with self._session.request(
                method,
                f"{url}/api/calls/{call_id}",
                headers={"Authorization": authorization},
                **self._secured(url),
            ) as answer:
                value = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return None
        if "tracker" in value:
            value["tracker"] = url
        return answer.status, value

    def _secured(self, url: str) -> dict[str, Any]:
        if self._context is None or not url.startswith("https:"):
            return {}
        return {"ssl": self._context(), "server_hostname": TRACKER_NAME}

    # ------------------------------------------------------------ drains, which all trackers keep

    async def set_drain(self, node_id: str, on: bool, reason: str) -> None:
        """Drains or takes back a node, at every tracker and across restarts."""

        def change(kept: dict[str, str] | None) -> dict[str, str]:
            others = {each: why for each, why in (kept or {}).items() if each != node_id}
            return {**others, node_id: reason} if on else others

        await self._books.settings.change(DRAINS, change)
        self._roster.feed(DrainSet(node_id, on, reason))

    async def apply_drains(self) -> None:
        """What is drained by setting, here or at another tracker."""
        drained: Mapping[str, str] = await self._books.settings.get(DRAINS, {})
        for node in list(self._roster.state.nodes.values()):
            wanted = node.node_id in drained
            if node.draining != wanted:
                self._roster.feed(DrainSet(node.node_id, wanted, drained.get(node.node_id, "")))

    # ------------------------------------------------------------ the exchange

    async def _exchange(self) -> None:
        healthy = True
        while True:
            try:
                await self.apply_drains()
                self._books.publish(self._tell())
                await self._listen()
                healthy = True
            except BooksError as error:
                if healthy:
                    log.warning("other trackers cannot be heard", error=error.message)
                healthy = False
            await asyncio.sleep(EXCHANGE_S)

    def _tell(self) -> dict[str, Any]:
        now = self._roster.clock()
        told = Told(http_url=self._own_url)
        for node in self._roster.state.nodes.values():
            if node.connection is not None:
                told.nodes.append(_without_templates(node, told.templates, now))
        in_flight = list(self._table.running())
        ended = [call for call in self._table.listed() if call.ended][:MAX_ENDED]
        name_of = self._roster.name_of
        told.calls = [(call.key_id, call.view(name_of)) for call in [*in_flight[:MAX_CALLS], *ended]]
        plain: dict[str, Any] = msgspec.to_builtins(told)
        if len(msgspec.json.encode(plain)) > MAX_BYTES:
            plain["calls"] = []
        return plain

    async def _listen(self) -> None:
        heard: dict[str, tuple[str, int, dict[str, Any]]] = {}
        peers = await self._books.trackers.peers()
        self._urls = {peer.id: peer.url for peer in peers}
        for peer in peers:
            try:
                told = msgspec.convert(peer.info, Told)
            except msgspec.ValidationError as error:
                log.warning("another tracker says what cannot be read", tracker=peer.id, error=str(error))
                continue
            now = self._roster.clock()
            nodes = tuple(_with_template(node, told.templates, now) for node in told.nodes)
            self._roster.feed(PeerSaid(peer.id, nodes))
            for key_id, view in told.calls:
                heard[view["id"]] = (peer.id, key_id, {**view, "tracker": peer.url})
        for gone in self._known - self._urls.keys():
            self._roster.feed(PeerSaid(gone, ()))
        self._known = set(self._urls)
        self._show(heard)

    def _show(self, heard: dict[str, tuple[str, int, dict[str, Any]]]) -> None:
        before, self._calls = self._calls, heard
        if not self._feed.watched:
            return
        for call_id, (tracker_id, key_id, view) in heard.items():
            if before.get(call_id) != (tracker_id, key_id, view):
                shown = (view, Audience(key_id))
                self._feed.touch("call", call_id, CALL_INTERVAL_S, lambda shown=shown: shown)  # type: ignore[misc]
        for call_id, (_, key_id, _) in before.items():
            if call_id not in heard:
                self._feed.remove("call", call_id, Audience(key_id))


def _without_templates(node: Node, templates: dict[str, str], now: float) -> Node:
    """As it is told: clocks of other machines mean nothing, so that times become ages."""
    shards = []
    for shard in node.shards:
        if shard.card is not None:
            templates[shard.fingerprint] = shard.card.chat_template
            shard = _with_card(shard, replace(shard.card, chat_template=""))
        shards.append(shard)
    return replace(
        node,
        shards=tuple(shards),
        seen_at=now - node.seen_at,
        aside_until=max(0.0, node.aside_until - now),
        progress_at=0.0,
        losses=(),
        labels=dict(node.labels),
        cuts_sent={},
        peers_sent=(),
        dial_at=0.0,
        probe=ProbeWork(error=node.probe.error),
    )


def _with_template(node: Node, templates: Mapping[str, str], now: float) -> Node:
    shards = tuple(
        shard
        if shard.card is None
        else _with_card(shard, replace(shard.card, chat_template=templates.get(shard.fingerprint, "")))
        for shard in node.shards
    )
    aside = now + node.aside_until if node.aside_until else 0.0
    return replace(node, shards=shards, seen_at=now - node.seen_at, aside_until=aside)


def _with_card(shard: Shard, card: Card) -> Shard:
    return replace(shard, card=card)
