"""What goes into the membership state machine and what comes out of it: state, events, effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshnet.tracker.members import Hardware, LinkView, Node, Shard, Times


@dataclass(frozen=True, slots=True)
class Rules:
    """Times in seconds; see settings.py."""

    lease_s: float = 3.0
    wedge_s: float = 10.0
    flap_window_s: float = 600.0
    flap_free: int = 3
    flap_pause_s: float = 5.0
    flap_pause_max_s: float = 300.0


@dataclass(frozen=True, slots=True)
class State:
    rules: Rules
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    links: Mapping[tuple[str, str], LinkView] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Joined:
    """A node whose token or credential was accepted."""

    connection: int
    now_ms: int
    node_id: str
    name: str
    boot_id: int
    http_url: str
    grpc_address: str
    hardware: Hardware
    shards: tuple[Shard, ...]
    numerics_class: str
    memory_limit_bytes: int
    memory_free_bytes: int
    meshnet_version: str
    engine_version: str
    placement_wanted: bool = False
    n_slots: int = 0
    n_ctx: int = 0
    reserved_bytes: int = 0
    read_bytes_per_s: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardBeat:
    model: str
    start_layer: int
    end_layer: int
    free_slots: int
    free_kv_tokens: int
    queue_ms: float
    times: Times
    ready: bool
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    connection: int
    node_id: str
    now_ms: int
    latency_ms: float
    current_load: float
    shards: tuple[ShardBeat, ...]
    served_requests: int
    failed_requests: int
    progress: int
    waiting_steps: int
    oldest_step_ms: float
    memory_free_bytes: int
    on_battery: bool = False
    resting: str = ""


@dataclass(frozen=True, slots=True)
class ShardsChanged:
    connection: int
    node_id: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    connection: int
    node_id: str
    links: Mapping[str, LinkView]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The membership stream of a node broke, or it said that it leaves (`leaving`)."""

    connection: int
    node_id: str
    reason: str
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Probed:
    node_id: str
    boot_id: int
    model: str
    error: str
    """Empty when the whole shard answered."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """(address, reason) of what did not take a connection; see dialling.py."""

    node_id: str
    connection: int
    unreachable: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DrainSet:
    node_id: str
    on: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """The nodes on streams of another tracker of the mesh; none when that tracker is gone."""

    tracker_id: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    now_ms: int


Event = (
    Joined
    | Beat
    | ShardsChanged
    | LinksMeasured
    | StreamEnded
    | Probed
    | Dialled
    | DrainSet
    | PeerSaid
    | Tick
)


@dataclass(frozen=True, slots=True)
class Welcome:
    connection: int
    node_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Ends the stream with a reason and a remedy; `retry` says that trying again may help."""

    connection: int
    code: str
    message: str
    remedy: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class CloseStream:
    """A stream that no longer counts: its lease ran out, or the node came in on a newer one."""

    connection: int


@dataclass(frozen=True, slots=True)
class TellCuts:
    connection: int
    model: str
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellDrain:
    connection: int
    on: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TellLoad:
    """Take a shard on. `sources` are base URLs of machines that serve its bytes ("/": this tracker), `files`
    those of a hub; `job` comes back with the result."""

    connection: int
    job: int
    model: str
    fingerprint: str
    first: int
    last: int
    cuts: tuple[int, ...]
    sources: tuple[str, ...]
    files: tuple[str, ...]
    weights_pass: str = field(repr=False)
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TellUnload:
    """Let go of a shard, once nothing runs on it."""

    connection: int
    job: int
    model: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TellPeers:
    connection: int
    peers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TellServing:
    """The node's shards of the model answered the probe: calls may come."""

    connection: int
    model: str


@dataclass(frozen=True, slots=True)
class TellClose:
    """Nothing of a call is to stay on the node of attempts before `before_epoch`; 0: nothing at all."""

    connection: int
    call_id: str
    before_epoch: int


@dataclass(frozen=True, slots=True)
class Probe:
    node_id: str
    boot_id: int
    grpc_address: str
    model: str


@dataclass(frozen=True, slots=True)
class Dial:
    """Are these addresses (host:port) of the node to be reached?"""

    node_id: str
    connection: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TellNotice:
    """For the log of the node."""

    connection: int
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Calls that run over the node must move."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the console and the log."""

    event: str
    node_id: str
    line: str
    level: str = "info"


Tell = (
    Welcome
    | Refuse
    | TellCuts
    | TellLoad
    | TellUnload
    | TellDrain
    | TellPeers
    | TellServing
    | TellClose
    | TellNotice
)
"""What goes to a node over its stream."""
Effect = Tell | CloseStream | Probe | Dial | Gone | Say
