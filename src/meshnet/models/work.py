"""How much of a model one decoded token reads: the measure of a layer's time before anything was measured.

Decoding one token is bound by reading weights, so a layer's time goes with the bytes that the token touches:
all of a dense layer, and of a mixture of experts only the experts that are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.models.gguf import ModelFile


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Bytes read per decoded token: by each layer, by norm and output matrix, by the embedding."""

    layers: tuple[int, ...]
    output: int
    embedding: int

    @property
    def mean_layer(self) -> float:
        return sum(self.layers) / len(self.layers)


def decode_work(model: ModelFile) -> DecodeWork:
    """What each part of the model reads for one token."""
    experts = model.metadata.integer(f"{model.arch}.expert_count") or 0
    used = model.metadata.integer(f"{model.arch}.expert_used_count") or experts
    layers = [0] * model.n_layers
    for tensor in model.tensors:
        layer = tensor.layer
        if layer is None or layer >= model.n_layers:
            continue
        routed = experts > 0 and "_exps." in tensor.name
        layers[layer] += tensor.n_bytes * min(used, experts) // experts if routed else tensor.n_bytes
    row = model.embedding_bytes // max(model.n_vocab, 1)
    return DecodeWork(tuple(layers), model.output_bytes, row)
