"""What the tracker knows of a node: immutable values, replaced whole when something changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from meshnet.protocol.keys import name_of

NodeStatus = Literal["joining", "loading", "ready", "draining", "suspect", "lost"]


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str = ""
    os: str = ""
    cores: int = 0
    memory_bytes: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Times:
    """Measured milliseconds of compute; links are not in them."""

    decode_ms_per_layer: float = 0.0
    prefill_ms_per_token_layer: float = 0.0
    embed_ms: float = 0.0
    output_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Card:
    """What a head knows about its model for people and clients."""

    name: str = ""
    chat_template: str = field(default="", repr=False)
    tools: bool = False
    n_ctx_train: int = 0
    n_vocab: int = 0
    quantisation: str = ""
    bytes: int = 0
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """How far the bytes of a shard are on their way to its node, and where from."""

    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers start_layer..end_layer (inclusive) of a model on a node, and what its last heartbeat said."""

    model: str
    fingerprint: str
    arch: str
    start_layer: int
    end_layer: int
    model_layers: int
    entry_layers: tuple[int, ...]
    mid_shard_entry: bool
    n_slots: int
    n_ctx: int
    n_embd: int
    times: Times
    capacity_score: float
    state: str
    progress: float
    error: str
    numerics_class: str
    recurrent: bool
    card: Card | None
    memory_bytes: int
    free_slots: int
    free_kv_tokens: int
    queue_ms: float = 0.0
    healthy: bool = True
    """What the node itself says in its heartbeats."""
    sessions: tuple[str, ...] = ()
    """Calls that hold slots here, as last announced; a call stands once for each slot."""
    fetch: Fetch | None = None
    """While its bytes are on their way."""
    probed: bool = False
    """The whole shard has answered a probe since it was loaded."""

    @property
    def is_head(self) -> bool:
        return self.start_layer == 0

    @property
    def is_tail(self) -> bool:
        return self.end_layer == self.model_layers - 1

    @property
    def usable(self) -> bool:
        """Loaded, proven by a probe, and well by its own account."""
        return self.state == "ready" and self.probed and self.healthy

    def same_load(self, other: Shard) -> bool:
        """True when what is loaded is the same, so that an earlier probe still counts."""
        return (
            self.model == other.model
            and self.fingerprint == other.fingerprint
            and (self.start_layer, self.end_layer) == (other.start_layer, other.end_layer)
            and self.entry_layers == other.entry_layers
        )


class Way(NamedTuple):
    """Where a node's HTTP is, and the name in its certificate."""

    url: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ProbeWork:
    """Where the tracker stands with proving a node's shards."""

    running: bool = False
    failures: int = 0
    next_at: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Times `*_at` are seconds of the tracker's monotonic clock, `*_ms` unix milliseconds."""

    node_id: str
    name: str
    boot_id: int
    connection: int | None
    """The membership stream it is on; None once that broke."""
    http_url: str
    grpc_address: str
    hardware: Hardware
    shards: tuple[Shard, ...]
    numerics_class: str
    memory_limit_bytes: int
    memory_free_bytes: int
    meshnet_version: str
    engine_version: str
    placement_wanted: bool
    labels: Mapping[str, str]
    joined_ms: int
    seen_ms: int
    seen_at: float
    latency_ms: float = 0.0
    current_load: float = 0.0
    served_requests: int = 0
    failed_requests: int = 0
    progress: int = 0
    progress_at: float = 0.0
    waiting_steps: int = 0
    oldest_step_ms: float = 0.0
    on_battery: bool = False
    resting: str = ""
    """Why it takes no calls just now, by its own choice."""
    draining: bool = False
    drain_reason: str = ""
    wedged: bool = False
    losses: tuple[float, ...] = ()
    aside_until: float = 0.0
    lost_reason: str = ""
    lost_at: float = 0.0
    probe: ProbeWork = field(default_factory=ProbeWork)
    via: str = ""
    """The other tracker that holds the node's stream; empty: this one does."""
    unreachable: tuple[tuple[str, str], ...] = ()
    """(host:port, reason) where the tracker could not reach it; see dialling.py."""
    dial_at: float = 0.0
    cuts_sent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    peers_sent: tuple[tuple[str, str], ...] = ()
    n_slots: int = 0
    n_ctx: int = 0
    """Of shards that are placed here; n_ctx 0: the model's own, 4,096 at most."""
    reserved_bytes: int = 0
    read_bytes_per_s: float = 0.0
    """How fast it reads weights by its own measure at start; 0: not measured."""

    @property
    def connected(self) -> bool:
        return self.connection is not None or bool(self.via)

    @property
    def way(self) -> Way:
        return Way(self.http_url, name_of(self.node_id))

    def set_aside(self, now: float) -> bool:
        """True while a node that came and went too often waits out its pause."""
        return now < self.aside_until

    def routable(self, now: float) -> bool:
        """True when new calls may use it."""
        return self.connected and not self.draining and not self.wedged and not self.set_aside(now)

    def alive(self, now: float) -> bool:
        """True when a running call may go on over it: draining nodes finish what they run."""
        return self.connected and not self.wedged

    def status(self, now: float) -> NodeStatus:
        if not self.connected:
            return "lost"
        if self.draining or (self.shards and all(shard.state == "draining" for shard in self.shards)):
            return "draining"  # asked by the tracker, or told by a node that was told to stop
        if self.wedged or self.set_aside(now):
            return "suspect"
        if not self.shards:
            return "joining"
        if all(shard.usable for shard in self.shards):
            return "ready"
        if any(shard.state == "ready" and shard.probed for shard in self.shards):
            return "suspect"
        return "loading"

    def problems(self, now: float) -> tuple[str, ...]:
        """What is wrong, in words that name the remedy where there is one."""
        found: list[str] = []
        if not self.connected and self.lost_reason:
            found.append(self.lost_reason)
        if self.connected and self.set_aside(now):
            left = max(1, round(self.aside_until - now))
            found.append(f"left and came back {len(self.losses)} times; set aside for {left} s more")
        if self.wedged:
            found.append(
                f"its engine has completed no step for {self.oldest_step_ms / 1000:.0f} s while "
                f"{self.waiting_steps} wait; restart the node if it does not recover"
            )
        if self.connected and self.resting:
            found.append(f"rests: {self.resting}; it comes back by itself")
        if self.probe.error:
            found.append(f"did not answer the probe: {self.probe.error}")
        found.extend(
            f"layers {shard.start_layer}-{shard.end_layer} of {shard.model}: {shard.error}"
            for shard in self.shards
            if shard.error
        )
        return tuple(found)

    def with_shards(self, shards: tuple[Shard, ...]) -> Node:
        return replace(self, shards=shards)


@dataclass(frozen=True, slots=True)
class LinkView:
    """One direction between two nodes, as the sender measured it; `error` is empty while it works."""

    ms: float
    bytes_per_s: float
    error: str = ""
