"""Models as the mesh holds them, derived from its nodes: coverage, gaps, replicas, borders. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshnet.tracker.members import Card, Node, Shard

LayerRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Model:
    """One model id. `complete` counts usable shards of routable nodes only, `gaps` says what is missing."""

    model_id: str
    fingerprint: str
    arch: str
    layers: int
    n_ctx: int
    n_embd: int
    card: Card
    replicas: tuple[int, ...]
    """Usable holders by layer."""
    gaps: tuple[LayerRange, ...]
    loading: bool

    @property
    def complete(self) -> bool:
        return not self.gaps and self.layers > 0

    @property
    def fill_command(self) -> str | None:
        """The command that fills the gaps, on a machine that has joined nothing yet."""
        if not self.gaps:
            return None
        layers = ",".join(f"{first}-{last}" for first, last in self.gaps)
        return f"meshnet node --model {self.model_id} --layers {layers}"


def holders(nodes: Iterable[Node], model_id: str) -> Iterator[tuple[Node, Shard]]:
    """Every shard of the model on a connected node, usable or not."""
    wanted = model_id.lower()
    for node in nodes:
        if node.connected:
            for shard in node.shards:
                if shard.model == wanted:
                    yield node, shard


def known_fingerprint(nodes: Iterable[Node], model_id: str, but: str = "") -> tuple[str, Node] | None:
    """The fingerprint that connected nodes other than `but` serve under a model id, and one holder."""
    for node, shard in holders(nodes, model_id):
        if node.node_id != but:
            return shard.fingerprint, node
    return None


def build_models(nodes: Iterable[Node], now: float) -> dict[str, Model]:
    """All models by id, in the order of the ids; also those that only lost nodes held, which are all gap."""
    shards: dict[str, list[tuple[Node, Shard]]] = {}
    for node in sorted(nodes, key=lambda node: not node.connected):
        for shard in node.shards:
            known = shards.setdefault(shard.model, [])
            # A lost node's other file under the same id says nothing any more.
            if not known or known[0][1].fingerprint == shard.fingerprint:
                known.append((node, shard))
    return {model_id: _model(model_id, shards[model_id], now) for model_id in sorted(shards)}


def _model(model_id: str, held: list[tuple[Node, Shard]], now: float) -> Model:
    first = held[0][1]
    layers = first.model_layers
    replicas = [0] * layers
    n_ctx = 0
    card: Card | None = None
    loading = False
    for node, shard in held:
        card = card or shard.card
        if not (shard.usable and node.routable(now)):
            loading = loading or (node.connected and shard.state in ("loading", "ready"))
            continue
        n_ctx = shard.n_ctx if n_ctx == 0 else min(n_ctx, shard.n_ctx)
        for layer in range(shard.start_layer, min(shard.end_layer, layers - 1) + 1):
            replicas[layer] += 1
    return Model(
        model_id=model_id,
        fingerprint=first.fingerprint,
        arch=first.arch,
        layers=layers,
        n_ctx=n_ctx or min(shard.n_ctx for _, shard in held),
        n_embd=first.n_embd,
        card=card or Card(name=model_id),
        replicas=tuple(replicas),
        gaps=tuple(gaps(replicas)),
        loading=loading,
    )


def gaps(replicas: list[int]) -> list[LayerRange]:
    """Runs of layers without a holder."""
    found: list[LayerRange] = []
    for layer, count in enumerate(replicas):
        if count == 0:
            if found and found[-1][1] == layer - 1:
                found[-1] = (found[-1][0], layer)
            else:
                found.append((layer, layer))
    return found


def borders(nodes: Iterable[Node], model_id: str) -> tuple[int, ...]:
    """Every layer at which some shard starts or the next one would: where calls may change node."""
    found: set[int] = set()
    last = 0
    for _, shard in holders(nodes, model_id):
        found.update((shard.start_layer, shard.end_layer + 1))
        last = shard.model_layers
    return tuple(sorted(found - {0, last}))


def wanted_cuts(node: Node, model_id: str, model_borders: Iterable[int]) -> tuple[int, ...]:
    """The borders at which this node's shards should be enterable, beyond their own first layers."""
    wanted: set[int] = set()
    for shard in node.shards:
        if shard.model == model_id:
            wanted.update(cut for cut in model_borders if shard.start_layer < cut <= shard.end_layer)
    return tuple(sorted(wanted))


def missing_cuts(node: Node, model_id: str, cuts: Iterable[int]) -> bool:
    """True when some shard that contains a cut has not announced it as an entry layer."""
    for shard in node.shards:
        if shard.model != model_id or shard.mid_shard_entry:
            continue
        for cut in cuts:
            if shard.start_layer < cut <= shard.end_layer and cut not in shard.entry_layers:
                return True
    return False
