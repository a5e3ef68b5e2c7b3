"""Membership messages into values and back. What a node sends is bounded and made finite here."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

from meshnet.protocol import membership_pb2 as pb
from meshnet.tracker.members import Card, Fetch, Hardware, LinkView, Shard, Times
from meshnet.tracker.signals import Beat, Joined, ShardBeat

MAX_SHARDS = 64
MAX_TEXT = 256
MAX_LABELS = 32
MAX_ALIASES = 32
MAX_TEMPLATE = 256 << 10
MAX_SLOTS = 4_096


class WireError(ValueError):
    """A message that no node of this protocol sends; the text names the field."""


def finite(value: float, otherwise: float = 0.0) -> float:
    """The value when it is finite and not negative, else `otherwise`."""
    return value if math.isfinite(value) and value >= 0 else otherwise


def text(value: str, limit: int = MAX_TEXT) -> str:
    """Printable and bounded: node names and errors are shown on consoles."""
    return "".join(char if char.isprintable() else " " for char in value[:limit]).strip()


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        return False


def read_join(message: pb.JoinRequest, connection: int, now_ms: int) -> Joined:
    """Raises WireError for a join without an id or addresses, or with too many shards."""
    node_id = message.node_id
    if not 1 <= len(node_id) <= 128 or not node_id.isprintable() or any(c in node_id for c in " ,<>"):
        raise WireError("node_id must have 1 to 128 printable characters without spaces, commas, < and >")
    if not _is_address(message.http_url):
        raise WireError(f"http_url is {text(message.http_url)!r}; it has the form http(s)://host:port")
    if ":" not in message.grpc_address:
        raise WireError(f"grpc_address is {text(message.grpc_address)!r}; it has the form host:port")
    return Joined(
        connection=connection,
        now_ms=now_ms,
        node_id=node_id,
        name=text(message.name, 64).replace(",", " ") or node_id,
        boot_id=message.boot_id,
        http_url=message.http_url[:512],
        grpc_address=message.grpc_address[:512],
        hardware=Hardware(
            name=text(message.hardware.name),
            os=text(message.hardware.os),
            cores=message.hardware.cores,
            memory_bytes=message.hardware.memory_bytes,
            device=text(message.hardware.device) or "cpu",
        ),
        shards=read_shards(message.shards, text(message.numerics_class)),
        numerics_class=text(message.numerics_class),
        memory_limit_bytes=message.memory_limit_bytes,
        memory_free_bytes=message.memory_free_bytes,
        meshnet_version=text(message.meshnet_version, 64),
        engine_version=text(message.engine_version, 128),
        placement_wanted=message.placement_wanted,
        n_slots=min(message.n_slots, MAX_SLOTS),
        n_ctx=message.n_ctx,
        reserved_bytes=message.reserved_bytes,
        read_bytes_per_s=finite(message.read_bytes_per_s),
        labels={text(k, 64): text(v, 256) for k, v in sorted(message.labels.items())[:MAX_LABELS]},
    )


def read_shards(shards: object, numerics_class: str) -> tuple[Shard, ...]:
    """A ShardReport's or JoinRequest's list. Raises WireError when it is too long."""
    listed = list(shards)  # type: ignore[call-overload]
    if len(listed) > MAX_SHARDS:
        raise WireError(f"a node announces at most {MAX_SHARDS} shards, got {len(listed)}")
    return tuple(read_shard(shard, numerics_class) for shard in listed)


def read_shard(shard: pb.Shard, numerics_class: str) -> Shard:
    """Ids in lower case; entry layers sorted, the first layer always among them."""
    inside = {layer for layer in shard.entry_layers if shard.start_layer <= layer <= shard.end_layer}
    slots = min(shard.n_slots, MAX_SLOTS)
    card = None
    if shard.HasField("card"):
        card = Card(
            name=text(shard.card.name) or shard.model,
            chat_template=shard.card.chat_template[:MAX_TEMPLATE],
            tools=shard.card.tools,
            n_ctx_train=shard.card.n_ctx_train,
            n_vocab=shard.card.n_vocab,
            quantisation=text(shard.card.quantisation, 64),
            bytes=shard.card.bytes,
            aliases=tuple(text(alias, 128).lower() for alias in shard.card.aliases[:MAX_ALIASES]),
        )
    return Shard(
        model=text(shard.model).lower(),
        fingerprint=text(shard.fingerprint),
        arch=text(shard.arch, 64),
        start_layer=shard.start_layer,
        end_layer=shard.end_layer,
        model_layers=shard.model_layers,
        entry_layers=tuple(sorted(inside | {shard.start_layer})),
        mid_shard_entry=shard.mid_shard_entry,
        n_slots=slots,
        n_ctx=shard.n_ctx,
        n_embd=shard.n_embd,
        times=read_times(shard.times),
        capacity_score=finite(shard.capacity_score),
        state=shard.state,
        progress=min(finite(shard.progress), 1.0),
        error=text(shard.error, 1_024),
        numerics_class=text(shard.numerics_class) or numerics_class,
        recurrent=shard.recurrent,
        card=card,
        memory_bytes=shard.memory_bytes,
        fetch=Fetch(
            shard.fetch.done_bytes,
            shard.fetch.total_bytes,
            finite(shard.fetch.bytes_per_s),
            text(shard.fetch.source),
        )
        if shard.HasField("fetch")
        else None,
        free_slots=slots,
        free_kv_tokens=slots * shard.n_ctx,
    )


def read_times(times: pb.Times) -> Times:
    return Times(
        decode_ms_per_layer=finite(times.decode_ms_per_layer),
        prefill_ms_per_token_layer=finite(times.prefill_ms_per_token_layer),
        embed_ms=finite(times.embed_ms),
        output_ms=finite(times.output_ms),
    )


def read_beat(message: pb.Heartbeat, node_id: str, connection: int, now_ms: int) -> Beat:
    return Beat(
        connection=connection,
        node_id=node_id,
        now_ms=now_ms,
        latency_ms=finite(message.latency_ms),
        current_load=finite(message.current_load),
        shards=tuple(
            ShardBeat(
                model=shard.model.lower(),
                start_layer=shard.start_layer,
                end_layer=shard.end_layer,
                free_slots=shard.free_slots,
                free_kv_tokens=shard.free_kv_tokens,
                queue_ms=finite(shard.queue_ms),
                times=read_times(shard.times),
                ready=shard.ready,
                sessions=tuple(shard.sessions[:MAX_SLOTS]),
            )
            for shard in message.shards[:MAX_SHARDS]
        ),
        served_requests=message.served_requests,
        failed_requests=message.failed_requests,
        progress=message.progress,
        waiting_steps=message.waiting_steps,
        oldest_step_ms=finite(message.oldest_step_ms),
        memory_free_bytes=message.memory_free_bytes,
        resting=text(message.resting),
        on_battery=message.on_battery,
    )


def read_links(message: pb.LinkReport) -> dict[str, LinkView]:
    return {
        link.peer: LinkView(finite(link.ms), finite(link.bytes_per_s), text(link.error, 1_024))
        for link in message.links
    }
