"""The tracker's Prometheus metrics, one table (docs/metrics.md)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """One set per tracker process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.calls = Counter(
            "meshnet_calls",
            "Calls that ended, by model and outcome.",
            ["model", "outcome"],
            registry=registry,
        )
        self.refused = Counter(
            "meshnet_refused_requests",
            "Requests refused before any work, by code.",
            ["code"],
            registry=registry,
        )
        self.tokens = Counter(
            "meshnet_tokens",
            "Tokens of ended calls, by model and kind.",
            ["model", "kind"],
            registry=registry,
        )
        self.ttft = Histogram(
            "meshnet_time_to_first_token_seconds",
            "From acceptance to the first token.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.gap = Histogram(
            "meshnet_inter_token_seconds",
            "Between tokens of a call, as they reach the tracker.",
            ["model"],
            buckets=_GAPS,
            registry=registry,
        )
        self.queued = Histogram(
            "meshnet_queue_wait_seconds",
            "From acceptance to the route, of calls that had to wait.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.reroutes = Counter(
            "meshnet_reroutes", "Routes of running calls that were mended.", ["model"], registry=registry
        )
        self.stage_link = Histogram(
            "meshnet_hop_seconds",
            "Mean trip from a node to the next one in ended calls.",
            ["node"],
            buckets=_GAPS,
            registry=registry,
        )
        self.in_flight = Gauge("meshnet_calls_in_flight", "Calls that have not ended.", registry=registry)
        self.waiting = Gauge("meshnet_calls_waiting", "Calls in the queue.", registry=registry)
        self.tasks = Gauge("meshnet_tasks", "Tasks of the event loop.", registry=registry)
        self.viewers = Gauge("meshnet_event_viewers", "Open event streams.", registry=registry)
        self.nodes = Gauge("meshnet_nodes", "Nodes by state.", ["state"], registry=registry)
        self.free_slots = Gauge(
            "meshnet_free_slots", "Free slots by node and model.", ["node", "model"], registry=registry
        )
        self.free_kv = Gauge(
            "meshnet_free_kv_tokens", "Free KV room by node and model.", ["node", "model"], registry=registry
        )
        self.sent = Counter("meshnet_sent_bytes", "Bytes of answers sent to clients.", registry=registry)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
