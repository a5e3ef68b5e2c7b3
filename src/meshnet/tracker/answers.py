"""What every endpoint shares: the tracker's parts, the caller's key, JSON answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from meshnet.tracker.auth import Authenticator
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import KeyInfo
from meshnet.tracker.enrolling import Registrar
from meshnet.tracker.experience import BooksExperience
from meshnet.tracker.feed import Feed
from meshnet.tracker.library import Library
from meshnet.tracker.metrics import Metrics
from meshnet.tracker.orchestrator import Orchestrator
from meshnet.tracker.peers import PeerTrackers
from meshnet.tracker.recorder import Recorder
from meshnet.tracker.roster import Roster
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.steward import Steward
from meshnet.tracker.tuning import Tuning
from meshnet.tracker.wishes import Wishes

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Tracker:
    """Everything that answers need."""

    settings: TrackerSettings
    books: Books
    roster: Roster
    shelf: Shelf
    tuning: Tuning
    orchestrator: Orchestrator
    recorder: Recorder
    feed: Feed
    metrics: Metrics
    authenticator: Authenticator
    experience: BooksExperience
    peers: PeerTrackers
    wishes: Wishes
    library: Library
    steward: Steward
    registrar: Registrar | None = None
    """Gives certificates; None where the mesh runs without TLS."""
    grpc_port: int = 0
    started_s: int = 0
    stopping: bool = False


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        encode(value),
        status,
        {"cache-control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def key_of(request: Request) -> KeyInfo:
    """The caller's key; the shell has put it there for every path that is not open."""
    key: KeyInfo = request.state.key
    return key
