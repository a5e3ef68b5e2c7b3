"""What placement goes by: what a model's layers weigh, how much room a node has for them, how fast it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshnet.models.gguf import ModelFile
from meshnet.models.memory import memory_need
from meshnet.models.work import decode_work
from meshnet.routing import Link
from meshnet.routing.placement import ModelLayers
from meshnet.tracker.members import LinkView, Node, Shard

DEFAULT_SLOTS = 16
DEFAULT_CTX = 4096
MIN_MS = 1e-6


def model_layers(file: ModelFile) -> ModelLayers:
    """What placement needs to know of a model: bytes to hold, and work relative to the average layer."""
    work = decode_work(file)
    return ModelLayers(
        layer_bytes=file.layer_bytes,
        embedding_bytes=file.embedding_bytes,
        output_bytes=file.output_bytes,
        tied=file.tied,
        output_work=work.output / work.mean_layer,
        embedding_work=work.embedding / work.mean_layer,
        layer_work=tuple(size / work.mean_layer for size in work.layers),
    )


def context_of(node: Node, file: ModelFile) -> tuple[int, int]:
    """Slots and positions per slot of a shard that is placed on a node."""
    return node.n_slots or DEFAULT_SLOTS, node.n_ctx or min(file.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX)


def shard_bytes(node: Node, file: ModelFile, first: int, last: int) -> int:
    """What a shard would take of a node's memory."""
    slots, ctx = context_of(node, file)
    return memory_need(file, first, last, n_slots=slots, n_ctx=ctx).total


def kv_bytes(node: Node, file: ModelFile) -> int:
    """What a layer takes on a node beside its weights, on average, rounded up."""
    slots, ctx = context_of(node, file)
    whole = memory_need(file, 0, file.n_layers - 1, n_slots=slots, n_ctx=ctx)
    return -(-whole.kv // file.n_layers)


def compute_bytes(node: Node, file: ModelFile) -> int:
    """What the scratch buffers of one shard take, at most."""
    slots, ctx = context_of(node, file)
    last = file.n_layers - 1
    ends = ((0, last), (0, 0), (last, last))
    return max(memory_need(file, a, b, n_slots=slots, n_ctx=ctx).compute for a, b in ends)


def memory_of(node: Node) -> int:
    """Bytes that shards may take on a node, those that are loaded included."""
    held = sum(shard.memory_bytes for shard in node.shards)
    limit = node.memory_limit_bytes or node.hardware.memory_bytes
    free = node.memory_free_bytes + held if node.memory_free_bytes else limit
    return max(min(limit, free) - node.reserved_bytes, 0)


def layer_ms(node: Node, model_id: str, file: ModelFile, others: Iterable[Node]) -> float:
    """Milliseconds per token of an average layer on a node: measured on it; from how fast it read weights at
    its start; or as slow as the slowest that holds the model."""
    own = [s.times.decode_ms_per_layer for s in node.shards if s.model == model_id and measured(s)]
    if own:
        return max(max(own), MIN_MS)
    if node.read_bytes_per_s > 0:
        return max(decode_work(file).mean_layer / node.read_bytes_per_s * 1e3, MIN_MS)
    theirs = [
        s.times.decode_ms_per_layer for n in others for s in n.shards if s.model == model_id and measured(s)
    ]
    return max(max(theirs, default=1.0), MIN_MS)


def measured(shard: Shard) -> bool:
    """Whether a shard has measured itself."""
    return shard.times.decode_ms_per_layer > 0


def known_links(links: Mapping[tuple[str, str], LinkView]) -> dict[tuple[str, str], Link]:
    """The links that work."""
    return {pair: Link(link.ms, link.bytes_per_s or 1.0) for pair, link in links.items() if not link.error}
