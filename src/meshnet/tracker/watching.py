"""Watching calls: the list, one call, the console, the event stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from meshnet.protocol.errors import ApiError
from meshnet.tracker.answers import Tracker, answer, key_of
from meshnet.tracker.books.records import KeyInfo
from meshnet.tracker.console import Entry
from meshnet.tracker.feed import Viewer
from meshnet.tracker.forms import MAX_SEQ
from meshnet.tracker.live import LiveCall


class Watching:
    """`mesh` gives the nodes and models of a snapshot, as far as a key may see them."""

    def __init__(self, tracker: Tracker, mesh: Callable[[KeyInfo], dict[str, Any]]) -> None:
        self.t = tracker
        self._mesh = mesh

    def routes(self) -> list[Route]:
        return [
            Route("/api/calls", self.list_calls, methods=["GET"]),
            Route("/api/calls/{call}", self.get_call, methods=["GET"]),
            Route("/api/calls/{call}", self.cancel_call, methods=["DELETE"]),
            Route("/api/events", self.events, methods=["GET"]),
            Route("/api/console", self.console, methods=["GET"]),
        ]

    # ------------------------------------------------------------ calls

    async def list_calls(self, request: Request) -> Response:
        return answer({"calls": self._calls(key_of(request))})

    def _calls(self, key: KeyInfo) -> list[dict[str, Any]]:
        name_of = self.t.roster.name_of
        shown = [call.view(name_of) for call in self.t.recorder.table.listed() if _may_see(key, call.key_id)]
        elsewhere = [view for key_id, view in self.t.peers.calls() if _may_see(key, key_id)]
        if elsewhere:
            shown = sorted([*shown, *elsewhere], key=_in_flight_first)
        return shown

    def _call(self, request: Request) -> LiveCall | None:
        """The call, or None when another tracker runs it. Raises ApiError (404)."""
        call_id = request.path_params["call"]
        call = self.t.recorder.table.get(call_id)
        elsewhere = self.t.peers.call(call_id) if call is None else None
        owner = call.key_id if call is not None else elsewhere[0] if elsewhere is not None else None
        if owner is None or not _may_see(key_of(request), owner):
            raise ApiError(404, f"there is no call {call_id[:100]!r}", code="unknown_call", param="id")
        return call

    async def _forwarded(self, request: Request) -> Response:
        """The answer of the tracker that runs the call; what it told last where it does not answer."""
        call_id, method = request.path_params["call"], request.method
        secret = self.t.authenticator.secret_of(request.scope)
        found = await self.t.peers.forward(call_id, method, f"Bearer {secret}")
        if found is not None:
            return answer(found[1], found[0])
        elsewhere = self.t.peers.call(call_id)
        if elsewhere is None or method != "GET":
            raise ApiError(
                503,
                "the tracker that runs the call does not answer",
                type="server_error",
                code="tracker_unreachable",
                retry_after=1,
            )
        return answer(elsewhere[1])

    async def get_call(self, request: Request) -> Response:
        call = self._call(request)
        if call is None:
            return await self._forwarded(request)
        return answer(call.view(self.t.roster.name_of, timeline=True))

    async def cancel_call(self, request: Request) -> Response:
        call = self._call(request)
        if call is None:
            return await self._forwarded(request)
        self.t.orchestrator.cancel(call.call_id, "cancelled", "cancelled through the API")
        # The call's own task carries the cancellation out; it is next in the loop.
        for _ in range(100):
            if call.ended:
                break
            await asyncio.sleep(0.01)
        return answer({"id": call.call_id, "phase": call.phase})

    async def console(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > 16 or int(since) > MAX_SEQ:
            raise ApiError(
                400, f"since is {since[:50]!r}; it is the `next` of an earlier answer", param="since"
            )
        viewer = _viewer(key_of(request))
        found, following = self.t.recorder.console.since(
            int(since), lambda entry: self._may_read(viewer, entry)
        )
        return answer({"events": found, "next": following})

    def _may_read(self, viewer: Viewer, entry: Entry) -> bool:
        return self.t.recorder.audience_of(entry).includes(viewer)

    # ------------------------------------------------------------ the event stream

    async def events(self, request: Request) -> Response:
        key = key_of(request)
        last = request.headers.get("last-event-id", "")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            self._event_stream(key, int(last) if last.isascii() and last.isdigit() else None),
            headers=headers,
            media_type="text/event-stream",
        )

    async def _event_stream(self, key: KeyInfo, last: int | None) -> Any:
        feed = self.t.feed
        viewer = feed.open(key.scope == "admin", key.id)
        try:
            if last is not None:
                feed.resume(viewer, last)
            while not self.t.stopping:
                if viewer.stale:
                    yield feed.snapshot(viewer, self._snapshot(key, viewer))
                if await viewer.wait(min(1.0, self.t.settings.keepalive_s)):
                    data = viewer.take()
                    if data:
                        yield data
                elif time.monotonic() - viewer.sent_at >= self.t.settings.keepalive_s:
                    viewer.sent_at = time.monotonic()
                    yield b": alive\n\n"
        finally:
            feed.close(viewer)

    def _snapshot(self, key: KeyInfo, viewer: Viewer) -> dict[str, Any]:
        console, _ = self.t.recorder.console.since(0, lambda entry: self._may_read(viewer, entry))
        return {"calls": self._calls(key), "console": console, **self._mesh(key)}


def _viewer(key: KeyInfo) -> Viewer:
    return Viewer(0, key.scope == "admin", key.id)


def _may_see(key: KeyInfo, owner: int) -> bool:
    return key.scope == "admin" or owner == key.id


def _in_flight_first(view: dict[str, Any]) -> tuple[bool, int]:
    """Calls in flight by their beginning, then the ended, the last ended first."""
    ended = view["ended_ms"]
    return (False, view["accepted_ms"]) if ended is None else (True, -ended)
