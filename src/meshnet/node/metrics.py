"""The node's figures for Prometheus, read when they are asked for; docs/metrics.md explains them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from meshnet.node.links import Links
from meshnet.node.stages import Stages

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Node(Collector):
    def __init__(self, stages: Stages, links: Links, calls: Callable[[], int]) -> None:
        self._stages = stages
        self._calls = calls
        self._links = links
        self._process = psutil.Process()

    def collect(self) -> Iterable[Metric]:
        state, load = self._stages.state, self._stages.executor.load()
        counters = state.counters
        yield _counter(
            "step_tokens",
            "Rows that the engine ran, by kind",
            "kind",
            {"decode": counters.decode_tokens, "prefill": counters.prefill_tokens},
        )
        yield _counter(
            "engine_calls",
            "Engine calls, by kind",
            "kind",
            {"decode": counters.decode_calls, "prefill": counters.prefill_calls},
        )
        yield _counter(
            "requests",
            "Calls that ended here, by result",
            "result",
            {"served": counters.served, "failed": counters.failed},
        )
        yield CounterMetricFamily(
            "meshnet_node_sent_bytes",
            "Hidden states written to other nodes, in bytes",
            value=self._links.traffic.sent_bytes,
        )
        trips = GaugeMetricFamily("meshnet_node_hop_ms", "One way to another node", labels=["peer"])
        for peer, ms in state.links().items():
            trips.add_metric([peer], ms)
        yield trips
        shards = self._stages.shards
        idle = sum(shard.idle for shard in shards)
        free = sum(shard.free_slots for shard in shards) - idle
        busy = sum(shard.busy_slots for shard in shards)
        slots = GaugeMetricFamily("meshnet_node_slots", "Slots of all shards, by state", labels=["state"])
        for name, value in (("free", free), ("idle", idle), ("busy", busy)):
            slots.add_metric([name], value)
        yield slots
        ring = self._stages.flow.ring
        gauges: tuple[tuple[str, str, float], ...] = (
            ("sessions", "Open sessions", len(self._stages.sessions)),
            ("calls", "Calls whose head this node is", self._calls()),
            ("links", "Streams that this node dialled", len(self._links)),
            ("lines", "Streams that this node dialled whose frames have a line", self._links.lines),
            ("waiting_steps", "Steps that wait for the engine", load.waiting),
            ("oldest_step_ms", "Age of the oldest step that waits or runs", load.oldest_ms),
            ("step_latency_ms", "Milliseconds per decode step, moving average", state.latency_ms),
            ("load", "Busy slots over slots", state.current_load),
            ("kept_bytes", "Sent hidden states kept for replay", ring.bytes),
            ("tasks", "Tasks of the event loop", len(asyncio.all_tasks())),
            ("resident_bytes", "Resident memory of the process", self._process.memory_info().rss),
        )
        for gauge, text, figure in gauges:
            yield GaugeMetricFamily(f"meshnet_node_{gauge}", text, value=float(figure))


def _counter(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"meshnet_node_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class Metrics:
    """A registry of its own: several nodes may live in one process."""

    def __init__(self, stages: Stages, links: Links, calls: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Node(stages, links, calls))

    def render(self) -> bytes:
        """In the text format. On the event loop."""
        return generate_latest(self._registry)
