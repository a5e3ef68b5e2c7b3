"""The values Node and Model of docs/api.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshnet.tracker.catalogue import Model
from meshnet.tracker.dialling import unreached
from meshnet.tracker.members import Node, Shard
from meshnet.tracker.planning import ModelRouting


def node_view(node: Node, now: float, trust: float, notes: Sequence[str] = ()) -> dict[str, Any]:
    """`notes` are problems that only a look at the other nodes shows."""
    served = sorted({(s.start_layer, s.end_layer) for s in node.shards if s.state in ("ready", "draining")})
    problems = [*node.problems(now), *(unreached(node) if node.connected else ()), *notes]
    status = node.status(now)
    return {
        "node_id": node.node_id,
        "name": node.name,
        "ready": status == "ready",
        "alive": node.alive(now),
        "state": status,
        "hardware": {
            "name": node.hardware.name,
            "os": node.hardware.os,
            "cores": node.hardware.cores,
            "memory_bytes": node.hardware.memory_bytes,
            "device": node.hardware.device,
        },
        "http_url": node.http_url,
        "grpc_address": node.grpc_address,
        "served_layers": [list(pair) for pair in served],
        "shards": [shard_view(shard) for shard in node.shards],
        "latency_ms": round(node.latency_ms, 3),
        "current_load": round(node.current_load, 4),
        "capacity_score": max((shard.capacity_score for shard in node.shards), default=0.0),
        "memory_free_bytes": node.memory_free_bytes,
        "memory_limit_bytes": node.memory_limit_bytes,
        "numerics_class": node.numerics_class,
        "versions": {"meshnet": node.meshnet_version, "engine": node.engine_version},
        "trust": round(trust, 3),
        "served_requests": node.served_requests,
        "failed_requests": node.failed_requests,
        "on_battery": node.on_battery,
        "placed": node.placement_wanted,
        "joined_ms": node.joined_ms,
        "last_seen_ms": node.seen_ms,
        "problems": problems,
    }


def shard_view(shard: Shard) -> dict[str, Any]:
    return {
        "model": shard.model,
        "fingerprint": shard.fingerprint,
        "start_layer": shard.start_layer,
        "end_layer": shard.end_layer,
        "model_layers": shard.model_layers,
        "entry_layers": list(shard.entry_layers),
        "mid_shard_entry": shard.mid_shard_entry,
        "state": shard.state if shard.usable or shard.state != "ready" else "proving",
        "progress": shard.progress,
        "free_slots": shard.free_slots,
        "n_slots": shard.n_slots,
        "n_ctx": shard.n_ctx,
        "memory_bytes": shard.memory_bytes,
        "fetch": None
        if shard.fetch is None
        else {
            "done_bytes": shard.fetch.done_bytes,
            "total_bytes": shard.fetch.total_bytes,
            "bytes_per_s": shard.fetch.bytes_per_s,
            "source": shard.fetch.source,
        },
        "times": {
            "decode_ms_per_layer": shard.times.decode_ms_per_layer,
            "prefill_ms_per_token_layer": shard.times.prefill_ms_per_token_layer,
            "embed_ms": shard.times.embed_ms,
            "output_ms": shard.times.output_ms,
        },
    }


def model_view(
    model: Model, routing: ModelRouting, aliases: list[str], default: bool, tracker_url: str
) -> dict[str, Any]:
    fill = model.fill_command
    return {
        "id": model.model_id,
        "name": model.card.name or model.model_id,
        "aliases": aliases,
        "fingerprint": model.fingerprint,
        "arch": model.arch,
        "layers": model.layers,
        "n_ctx": model.n_ctx,
        "quantisation": model.card.quantisation,
        "bytes": model.card.bytes,
        "complete": model.complete,
        "gaps": [list(gap) for gap in model.gaps],
        "replicas": list(model.replicas),
        "tools": model.card.tools,
        "cost_model": routing.cost_model,
        "default": default,
        "fill_command": None if fill is None else f"{fill} --tracker {tracker_url} --join-token TOKEN",
    }


def openai_model(model: Model, created: int, aliases: list[str]) -> dict[str, Any]:
    """The value that GET /v1/models lists; `aliases` are further names that requests may use."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": created,
        "owned_by": "meshnet",
        "aliases": aliases,
    }
