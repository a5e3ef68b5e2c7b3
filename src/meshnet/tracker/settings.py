"""What an operator can set, by environment (MESHNET_TRACKER_...) or command line; all have sane defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from meshnet.protocol.calls import ALIVE_S

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/meshnet/tracker`, by default under `~/.local/share`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "meshnet" / "tracker"


Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class TrackerSettings(BaseSettings):
    """Times are in the unit that the name ends with; sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="MESHNET_TRACKER_", extra="forbid")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 8081
    advertise: str = ""
    """Host that nodes are told to dial for gRPC; empty: the host of the request that asks."""
    data: Path = Field(default_factory=default_data_dir)
    database: str = ""
    """URL of a PostgreSQL or SQLite database; empty: SQLite in `data`."""
    new_keys: bool = False
    """Make and show further keys and a join token where the data has some already."""
    insecure: bool = False
    """No TLS between the machines of the mesh, though others than this one can reach the tracker."""
    tls_cert: Path | None = None
    """An own certificate (PEM, with its chain) for browsers and clients; `tls_key` if its key lies apart."""
    tls_key: Path | None = None
    mdns: bool = True
    """Says on the local network where the tracker is, when it listens beyond loopback."""
    certificate_hours: Annotated[float, Field(gt=0, le=24 * 365)] = 24.0 * 7
    """How long a node's certificate holds; it is renewed after two thirds of that."""
    name: str = "meshnet"
    log: Literal["console", "json"] = "console"

    heartbeat_ms: Count = 1_000
    lease_ms: Count = 3_000
    wedge_ms: Count = 10_000
    """An engine that has work and completes no step for this long is wedged."""
    probe_timeout_s: Seconds = 30.0
    flap_window_s: Seconds = 600.0
    flap_free: Annotated[int, Field(ge=0)] = 3
    """So many losses within the window are forgiven; each further one sets the node aside for longer."""
    flap_pause_s: Seconds = 5.0
    flap_pause_max_s: Seconds = 300.0

    queue_length: Count = 512
    queue_length_per_key: Count = 256
    queue_wait_s: Seconds = 120.0
    call_limit_s: Seconds = 3_600.0
    stalled_reader_s: Seconds = 60.0
    keepalive_s: Seconds = 10.0
    connect_timeout_s: Seconds = 3.0
    """How long a head may take to accept a connection."""
    first_event_s: Seconds = 10.0
    """How long a head may take to accept a call or a new route."""
    head_silence_s: Seconds = 3 * ALIVE_S
    """How long a head that works on a call may send nothing at all: three signs of life."""
    park_s: Seconds = 2.0
    """How long a call that lost a node keeps its head while every substitute is full; then it waits in front
    of the queue for room on a whole route."""
    max_reroutes: Annotated[int, Field(ge=0)] = 8
    fallback_models: dict[str, str] = Field(default_factory=dict)
    """Model id -> the model that answers, marked degraded, when the first has no route."""

    max_body_bytes: Count = 8 << 20
    max_header_bytes: Count = 64 << 10
    header_timeout_s: Seconds = 15.0
    body_timeout_s: Seconds = 30.0
    max_connections: Count = 4_096
    idle_connection_s: Seconds = 75.0
    failed_keys_per_minute: Count = 20
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    session_hours: Seconds = 24.0 * 7

    ended_calls: Count = 500
    console_events: Count = 2_000
    viewer_outbox: Count = 1_000
    shutdown_s: Seconds = 3.0

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Origins separated by commas."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach the tracker."""
        return self.host in LOOPBACK

    @property
    def tls(self) -> bool:
        """True when the machines of the mesh speak TLS: by default wherever others can listen in."""
        return not self.loopback and not self.insecure

    @property
    def https_only(self) -> bool:
        """True when browsers and clients have a certificate that they know."""
        return self.tls_cert is not None
