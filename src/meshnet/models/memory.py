"""What a shard will take, told from its header alone, before a byte of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.models.architecture import recurrent_layers, refusal
from meshnet.models.gguf import ModelFile

KV_BYTES = 2
"""Keys and values are kept as 16-bit floats."""
STATE_BYTES = 4
"""Recurrent states are kept as 32-bit floats."""
CONTEXT_STEP = 256
"""llama.cpp rounds a slot's context up to a multiple of this."""
LOGIT_ROWS = 64
"""Rows of one call that can give logits: the room for them is taken when a context is made."""
FLOOR = 12 << 20
"""Graphs, vocabulary and scratch space of a context, however small the model is."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a shard will take, told before it is loaded."""

    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


def _per_layer(model: ModelFile, key: str, default: int) -> list[int]:
    value = model.metadata.get(f"{model.arch}.{key}")
    if isinstance(value, list):
        return [int(item) for item in value[: model.n_layers]]
    return [int(value) if isinstance(value, int) else default] * model.n_layers


def memory_need(
    model: ModelFile, first: int, last: int, *, n_slots: int, n_ctx: int, max_rows: int = 256
) -> MemoryNeed:
    """Bytes for layers `first..last` with `n_slots` slots of `n_ctx` positions.

    `weights` and `kv` are exact to a few per cent; `compute` is an upper estimate of llama.cpp's scratch
    buffers for one call: feed-forward activations, attention, and logits, for which a head has room too.
    """
    arch = model.arch

    def number(key: str, default: int) -> int:
        found = model.metadata.integer(f"{arch}.{key}")
        return default if found is None else found

    weights = sum(model.layer_bytes[first : last + 1])
    is_head, is_tail = first == 0, last == model.n_layers - 1
    weights += model.embedding_bytes if is_head else 0
    weights += model.output_bytes if is_tail and not (is_head and model.tied) else 0
    heads = _per_layer(model, "attention.head_count", 1)
    kv_heads = _per_layer(model, "attention.head_count_kv", max(heads))
    width = model.n_embd // max(max(heads), 1)
    row = number("attention.key_length", width) + number("attention.value_length", width)
    cells = -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP * n_slots
    kinds = (False,) * model.n_layers if refusal(arch) else recurrent_layers(model)
    inner, state = number("ssm.inner_size", 0), number("ssm.state_size", 0)
    groups, window = number("ssm.group_count", 0), number("ssm.conv_kernel", 1)
    recurrent = STATE_BYTES * n_slots * (inner * state + (window - 1) * (inner + 2 * groups * state))
    kv = sum(
        recurrent if kinds[layer] else kv_heads[layer] * row * KV_BYTES * cells
        for layer in range(first, last + 1)
    )
    wide = max(
        *_per_layer(model, "feed_forward_length", 0),
        number("expert_feed_forward_length", 0) * number("expert_used_count", 0),
        inner,
        model.n_embd,
    )
    rows_out = LOGIT_ROWS if is_tail else max_rows if is_head else 0
    activations = max_rows * (4 * wide + 6 * model.n_embd) + rows_out * model.n_vocab
    compute = FLOOR + 4 * activations + 2 * max_rows * cells
    return MemoryNeed(weights, kv, compute)
