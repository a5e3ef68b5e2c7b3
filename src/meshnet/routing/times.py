"""What nodes measure: compute times per node and trips per link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from meshnet.routing import checks


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """One node's own measurements, compute only, without any trip.

    decode_ms_per_layer         milliseconds of one layer in a decode step of one token
    prefill_ms_per_token_layer  milliseconds of one layer per token of a prefill chunk
    embed_ms                    milliseconds of the embedding per decode step (the head pays it)
    output_ms                   milliseconds of norm, output matrix and sampling per token (the tail pays it)
    free_slots                  sessions it could still open
    free_kv_tokens              tokens its KV room could still hold
    queue_ms                    milliseconds until it would start on a new call

    ValueError on NaN, infinities, negative values and counts that are not integers.
    """

    decode_ms_per_layer: float
    prefill_ms_per_token_layer: float
    embed_ms: float = 0.0
    output_ms: float = 0.0
    free_slots: int = 1
    free_kv_tokens: int = 1 << 40
    queue_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check = checks.whole if field.name.startswith("free_") else checks.number
            check(field.name, getattr(self, field.name))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> NodeTimes:
        """Reads times by name; the two per-layer times are required; unknown names are refused."""
        checks.mapping("times", data)
        checks.known_keys("node time", data, [field.name for field in fields(cls)])
        for required in ("decode_ms_per_layer", "prefill_ms_per_token_layer"):
            if required not in data:
                raise ValueError(f"{required} is missing in the times {dict(data)!r}")
        return cls(**data)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one node to another.

    ms           milliseconds that the hidden state of one token takes, one way
    bytes_per_s  what the link carries; charged for the bytes of a prefill chunk
    """

    ms: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        checks.number("link.ms", self.ms)
        checks.positive("link.bytes_per_s", self.bytes_per_s)
