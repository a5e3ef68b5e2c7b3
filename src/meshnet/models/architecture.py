"""What is known, architecture by architecture, about cutting a model between two layers.

A model may be cut where a layer's output is all that the next layer needs, and where a layer behaves the
same when it is renumbered. Both are facts about llama.cpp's graph of an architecture, so the table lists only
architectures whose cut and whole forms were run side by side (`tests/models/test_cut.py`); all others are
refused, by name and with the reason, because a wrong cut gives fluent nonsense and no error.

Facts that the table rests on: each graph calls a layer's result `l_out-<layer>`; layers of unlike kind
(recurrent or attention, sliding window or full) get their kind from a pattern over the layer's number unless
an explicit array per layer says so; models with several rope sections want four positions per embedded row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from meshnet.models.errors import LayersOutside, Uncuttable
from meshnet.models.gguf import ModelFile
from meshnet.models.metadata import ARRAY, STRING

SLIDING_KEY = "attention.sliding_window_pattern"
RECURRENT_KEY = "attention.recurrent_layers"

# Arrays with one number per layer, in every architecture that has them at all.
PER_LAYER_KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    SLIDING_KEY,
    RECURRENT_KEY,
)
# Arrays that are about the whole model, however long they happen to be.
_WHOLE_MODEL_KEYS = ("rope.dimension_sections", "rope.scaling.factors")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to run a shard of one architecture.

    `layer_output` is the stem of the name of a layer's result in the graph (`l_out` names `l_out-7`);
    `positions_per_row` is how many positions a batch of embedded rows holds per row, section by section;
    `full_attention_every` / `full_window_every`: every n-th layer is of full attention and the others are
    recurrent, or of a full window and the others sliding; 0 where the architecture has no such pattern;
    `demands_output`: the graph does not fall back on the embedding when a file lacks the output matrix.
    """

    name: str
    layer_output: str = "l_out"
    positions_per_row: int = 1
    full_attention_every: int = 0
    full_window_every: int = 0
    demands_output: bool = False

    @property
    def recurrent(self) -> bool:
        """Some layers keep a recurrent state, which only goes back to checkpoints."""
        return self.full_attention_every > 0


_CUTTABLE = {
    known.name: known
    for known in (
        Architecture("llama"),
        Architecture("qwen2"),
        Architecture("qwen2moe", demands_output=True),
        Architecture("qwen3"),
        Architecture("qwen3moe"),
        Architecture("phi3"),
        Architecture("gemma3", full_window_every=6),
        Architecture("gpt-oss", full_window_every=2, demands_output=True),
        Architecture("qwen3next", full_attention_every=4),
        Architecture("qwen35", positions_per_row=4, full_attention_every=4),
        Architecture("qwen35moe", positions_per_row=4, full_attention_every=4),
    )
}

_PER_LAYER_INPUT = "every layer gets an input of its own made from the tokens, which the cut would lose"
_BY_NUMBER = "a layer's position encoding is switched by its absolute number, which changes in a shard"
_NO_DECODER = "it is not a model that writes one token after another"
_REFUSED = {
    "gemma3n": _PER_LAYER_INPUT,
    "gemma4": _PER_LAYER_INPUT,
    "smollm3": _BY_NUMBER,
    "llama4": _BY_NUMBER,
    "smallthinker": _BY_NUMBER,
    "bert": _NO_DECODER,
    "nomic-bert": _NO_DECODER,
    "modern-bert": _NO_DECODER,
    "clip": _NO_DECODER,
    "t5": "its decoder also reads the encoder's result in every layer, which the cut would lose",
    "t5encoder": _NO_DECODER,
    "rwkv7": "the first layer's value is read by all later layers, which the cut would lose",
}


def refusal(arch: str) -> str | None:
    """Why models of this architecture cannot be cut: one sentence that names it, or None if they can."""
    if arch in _CUTTABLE:
        return None
    reason = _REFUSED.get(arch)
    if reason is None:
        return (
            f"models of the architecture '{arch}' are not cut: it is not proven that they give the same "
            f"tokens cut as whole (proven: {', '.join(sorted(_CUTTABLE))}); run it on one node"
        )
    return f"models of the architecture '{arch}' cannot be cut: {reason}; run it on one node"


def architecture(arch: str) -> Architecture:
    """What is known about an architecture. Raises Uncuttable with the sentence of `refusal`."""
    if reason := refusal(arch):
        raise Uncuttable(reason)
    return _CUTTABLE[arch]


def model_refusal(model: ModelFile) -> str | None:
    """Why this very model cannot be cut, or None; `refusal` plus what only its metadata tells."""
    if reason := refusal(model.arch):
        return reason
    if model.arch == "gemma3" and model.n_layers == 62:
        return (
            f"{model.name}: the attention scale of a gemma3 with 62 layers hangs on the number of layers in "
            "the file, which changes in a shard; run it on one node"
        )
    prefix = f"{model.arch}."
    known = {prefix + key for key in PER_LAYER_KEYS + _WHOLE_MODEL_KEYS}
    for key, entry in model.metadata.entries().items():
        unknown = key.startswith(prefix) and key not in known and entry.kind == ARRAY
        if unknown and entry.array_length == model.n_blocks:
            return (
                f"{model.name}: {key} has one value per layer, and this version does not know how to cut it; "
                "run the model on one node"
            )
    for key in PER_LAYER_KEYS:
        if prefix + key not in model.metadata:
            continue
        entry = model.metadata.entry(prefix + key)
        length = entry.array_length
        if length is not None and (length < model.n_layers or entry.array_kind == STRING):
            return (
                f"{model.name}: {prefix}{key} has {length} values for {model.n_layers} layers; fetch it again"
            )
    return None


def layer_output_name(file: ModelFile, layer: int) -> str:
    """The graph's name for the result of layer `layer` (counted in the whole model) in a model or shard file.

    Raises LayersOutside if the file does not hold that layer.
    """
    first, last = file.shard_range or (0, file.n_layers - 1)
    if not first <= layer <= last:
        raise LayersOutside(f"{file.name} holds layers {first}-{last}, not {layer}; load a shard that does")
    return f"{architecture(file.arch).layer_output}-{layer - first + file.filler_before}"


def recurrent_layers(model: ModelFile) -> tuple[bool, ...]:
    """For each layer of the model, whether it keeps a recurrent state instead of keys and values."""
    known = architecture(model.arch)
    interval = model.metadata.integer(f"{model.arch}.full_attention_interval") or known.full_attention_every
    return _kinds(model, RECURRENT_KEY, interval if known.recurrent else 0)


def sliding_layers(model: ModelFile) -> tuple[bool, ...]:
    """For each layer of the model, whether its attention sees only a sliding window."""
    known = architecture(model.arch)
    if not known.full_window_every or not model.metadata.integer(f"{model.arch}.attention.sliding_window"):
        return (False,) * model.n_layers
    stated = model.metadata.integer(f"{model.arch}.{SLIDING_KEY}")
    if stated == 0:
        return (True,) * model.n_layers
    return _kinds(model, SLIDING_KEY, stated or known.full_window_every)


def _kinds(model: ModelFile, key: str, interval: int) -> tuple[bool, ...]:
    name = f"{model.arch}.{key}"
    if name in model.metadata and model.metadata.entry(name).kind == ARRAY:
        stated = cast(list[int], model.metadata[name])
        return tuple(bool(value) for value in stated[: model.n_layers])
    return tuple(interval > 0 and (layer + 1) % interval != 0 for layer in range(model.n_layers))
