"""Tiny GGUF models with random weights, for tests that need an architecture rather than an answer.

The weights are scaled so that greedy decoding wanders instead of settling on one token: each layer adds about
as much to the stream as it finds there, and the embedding is small against that, so that a token does not
simply predict itself. The tokeniser is a byte-level BPE that any text goes through.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = ("Ġthe", "Ġto", "Ġof", "Ġand", "Ġin", "Ġis", "ing", "er", "ion", "Ġme", "ll", "es")
N_CTX_TRAIN = 4096
SHARPNESS = 2.2
SLIDING_WINDOW = 96
FULL_WINDOW_EVERY = 6
FULL_ATTENTION_EVERY = 4

CUTTABLE = (
    "llama",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "gemma3",
    "phi3",
    "gpt-oss",
    "qwen3next",
    "qwen35",
    "qwen35moe",
)
UNCUTTABLE = "smollm3"
DEFAULT_LAYERS = {"llama": 40, "qwen35moe": 40, "gemma3": 14}

_QUANTS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q5_1": gguf.GGMLQuantizationType.Q5_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
}


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte, as byte-level BPE vocabularies write them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters, spare = {}, 0
    for byte in range(256):
        if byte in printable:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(256 + spare)
            spare += 1
    return [characters[byte] for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their GGUF types, and the merges that reach the longer ones."""
    tokens = _byte_characters()
    merges: list[str] = []
    for word in _WORDS:
        built = word[0]
        for character in word[1:]:
            merge = f"{built} {character}"
            built += character
            if merge not in merges:
                merges.append(merge)
            if built not in tokens:
                tokens.append(built)
    kinds = [int(gguf.TokenType.NORMAL)] * len(tokens) + [int(gguf.TokenType.CONTROL)] * len(_SPECIAL)
    return tokens + list(_SPECIAL), kinds, merges


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model; K-quants need rows of 256, smaller ones keep a file of floats small."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_head: int = 4
    n_head_kv: int = 2
    head: int = 32
    n_expert: int = 4
    n_expert_used: int = 2
    n_ff_exp: int = 32
    tied: bool = False
    n_prediction: int = 0
    full_attention_every: int = FULL_ATTENTION_EVERY
    extra: dict[str, Any] = field(default_factory=dict)


class _Writer:
    def __init__(
        self, path: Path, arch: str, shape: Shape, quant: str, seed: int, split_tensors: int
    ) -> None:
        self.out = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors)
        self.arch = arch
        self.shape = shape
        self.quant = quant
        self.random = np.random.default_rng([seed, *arch.encode(), *quant.encode()])

    def matrix(self, name: str, rows: int, columns: int, *, experts: int = 0, gain: float = 1.0) -> None:
        """A weight of `rows` outputs over `columns` inputs; with a gain of 1 it keeps the size of values."""
        size = (experts, rows, columns) if experts else (rows, columns)
        std = gain / float(np.sqrt(columns))
        if self.quant == "q4_k" and columns % 256 == 0:
            blocks = _random_q4_k(self.random, size, std)
            self.out.add_tensor(f"{name}.weight", blocks, raw_dtype=_QUANTS["q4_k"])
            return
        values = self.random.standard_normal(size, dtype=np.float32) * np.float32(std)
        self.put(f"{name}.weight", values, "q8_0" if self.quant == "q4_k" else self.quant)

    def put(self, name: str, values: Array, quant: str = "f32") -> None:
        if quant == "f32":
            self.out.add_tensor(name, values.astype(np.float32))
        else:
            kind = _QUANTS[quant]
            self.out.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(self, name: str, size: int, mean: float = 1.0) -> None:
        self.put(f"{name}.weight", mean + 0.1 * self.random.standard_normal(size, dtype=np.float32))

    def vector(self, name: str, size: int, mean: float, std: float) -> None:
        self.put(name, mean + std * self.random.standard_normal(size, dtype=np.float32))

    def key(self, key: str, value: Any) -> None:
        name = f"{self.arch}.{key}"
        if isinstance(value, bool):
            self.out.add_bool(name, value)
        elif isinstance(value, int):
            self.out.add_uint32(name, value)
        elif isinstance(value, float):
            self.out.add_float32(name, value)
        else:
            self.out.add_array(name, value)


def _random_q4_k(random: np.random.Generator, size: tuple[int, ...], std: float) -> NDArray[np.uint8]:
    """Valid Q4_K blocks drawn directly: 8 sub-blocks of 32 values `d * scale * (q - 7.5)`, q of 4 bits."""
    count = int(np.prod(size)) // 256
    scales = random.integers(16, 64, (count, 8), dtype=np.uint8)
    mean_square = np.mean(np.arange(16, 64, dtype=np.float64) ** 2) * np.mean((np.arange(16) - 7.5) ** 2)
    delta = np.full((count, 1), std / np.sqrt(mean_square), dtype=np.float16)
    minimum = (delta.astype(np.float32) * 7.5).astype(np.float16)
    # six bits per scale and per minimum (here the same): the low four halves share bytes with the high bits
    low, high = scales[:, :4], scales[:, 4:]
    first = low | ((high >> 4) << 6)
    packed = np.concatenate([first, first, (high & 15) | ((high & 15) << 4)], axis=1)
    values = random.integers(0, 256, (count, 128), dtype=np.uint8)
    blocks = np.concatenate([delta.view(np.uint8), minimum.view(np.uint8), packed, values], axis=1)
    return blocks.reshape(*size[:-1], size[-1] // 256 * 144)


def _attention(w: _Writer, block: str, *, bias: bool = False, head_norm: bool = False) -> None:
    s = w.shape
    for name, heads in (("attn_q", s.n_head), ("attn_k", s.n_head_kv), ("attn_v", s.n_head_kv)):
        # attention must be sharp, or every position sees the same mean and decoding settles on a token
        gain = 1.0 if head_norm or name == "attn_v" else SHARPNESS
        w.matrix(f"{block}.{name}", heads * s.head, s.n_embd, gain=gain)
        if bias:
            w.vector(f"{block}.{name}.bias", heads * s.head, 0.0, 0.1)
    w.matrix(f"{block}.attn_output", s.n_embd, s.n_head * s.head)
    if head_norm:
        w.norm(f"{block}.attn_q_norm", s.head, SHARPNESS)
        w.norm(f"{block}.attn_k_norm", s.head, SHARPNESS)


def _feed_forward(w: _Writer, block: str) -> None:
    s = w.shape
    w.matrix(f"{block}.ffn_gate", s.n_ff, s.n_embd)
    w.matrix(f"{block}.ffn_up", s.n_ff, s.n_embd)
    w.matrix(f"{block}.ffn_down", s.n_embd, s.n_ff)


def _experts(w: _Writer, block: str, *, shared: bool) -> None:
    s = w.shape
    w.put(
        f"{block}.ffn_gate_inp.weight",
        w.random.standard_normal((s.n_expert, s.n_embd), dtype=np.float32) / np.float32(np.sqrt(s.n_embd)),
    )
    w.matrix(f"{block}.ffn_gate_exps", s.n_ff_exp, s.n_embd, experts=s.n_expert)
    w.matrix(f"{block}.ffn_up_exps", s.n_ff_exp, s.n_embd, experts=s.n_expert)
    w.matrix(f"{block}.ffn_down_exps", s.n_embd, s.n_ff_exp, experts=s.n_expert)
    if shared:
        w.vector(f"{block}.ffn_gate_inp_shexp.weight", s.n_embd, 0.0, 0.1)
        w.matrix(f"{block}.ffn_gate_shexp", s.n_ff_exp, s.n_embd)
        w.matrix(f"{block}.ffn_up_shexp", s.n_ff_exp, s.n_embd)
        w.matrix(f"{block}.ffn_down_shexp", s.n_embd, s.n_ff_exp)


def _llama(w: _Writer, block: str, layer: int) -> None:
    w.norm(f"{block}.attn_norm", w.shape.n_embd)
    _attention(w, block)
    w.norm(f"{block}.ffn_norm", w.shape.n_embd)
    _feed_forward(w, block)


def _qwen2(w: _Writer, block: str, layer: int) -> None:
    w.norm(f"{block}.attn_norm", w.shape.n_embd)
    _attention(w, block, bias=True)
    w.norm(f"{block}.ffn_norm", w.shape.n_embd)
    _feed_forward(w, block)


def _qwen2moe(w: _Writer, block: str, layer: int) -> None:
    w.norm(f"{block}.attn_norm", w.shape.n_embd)
    _attention(w, block, bias=True)
    w.norm(f"{block}.ffn_norm", w.shape.n_embd)
    _experts(w, block, shared=True)


def _qwen3(w: _Writer, block: str, layer: int) -> None:
    w.norm(f"{block}.attn_norm", w.shape.n_embd)
    _attention(w, block, head_norm=True)
    w.norm(f"{block}.ffn_norm", w.shape.n_embd)
    _feed_forward(w, block)


def _qwen3moe(w: _Writer, block: str, layer: int) -> None:
    w.norm(f"{block}.attn_norm", w.shape.n_embd)
    _attention(w, block, head_norm=True)
    w.norm(f"{block}.ffn_norm", w.shape.n_embd)
    _experts(w, block, shared=False)


def _gemma3(w: _Writer, block: str, layer: int) -> None:
    w.norm(f"{block}.attn_norm", w.shape.n_embd)
    _attention(w, block, head_norm=True)
    w.norm(f"{block}.post_attention_norm", w.shape.n_embd)
    w.norm(f"{block}.ffn_norm", w.shape.n_embd)
    _feed_forward(w, block)
    w.norm(f"{block}.post_ffw_norm", w.shape.n_embd)


def _phi3(w: _Writer, block: str, layer: int) -> None:
    s = w.shape
    w.norm(f"{block}.attn_norm", s.n_embd)
    w.matrix(f"{block}.attn_qkv", (s.n_head + 2 * s.n_head_kv) * s.head, s.n_embd, gain=SHARPNESS)
    w.matrix(f"{block}.attn_output", s.n_embd, s.n_head * s.head)
    w.norm(f"{block}.ffn_norm", s.n_embd)
    w.matrix(f"{block}.ffn_up", 2 * s.n_ff, s.n_embd)
    w.matrix(f"{block}.ffn_down", s.n_embd, s.n_ff)


def _gpt_oss(w: _Writer, block: str, layer: int) -> None:
    """Attention with a sink per head, experts, and a bias on everything."""
    s = w.shape
    w.norm(f"{block}.attn_norm", s.n_embd)
    _attention(w, block, bias=True)
    w.vector(f"{block}.attn_output.bias", s.n_embd, 0.0, 0.1)
    w.vector(f"{block}.attn_sinks.weight", s.n_head, 0.0, 1.0)
    w.norm(f"{block}.post_attention_norm", s.n_embd)
    _experts(w, block, shared=False)
    w.vector(f"{block}.ffn_gate_inp.bias", s.n_expert, 0.0, 0.1)
    for name, size in (("gate", s.n_ff_exp), ("up", s.n_ff_exp), ("down", s.n_embd)):
        values = 0.1 * w.random.standard_normal((s.n_expert, size), dtype=np.float32)
        w.put(f"{block}.ffn_{name}_exps.bias", values)


def _gated_attention(w: _Writer, block: str) -> None:
    """Full attention whose queries come with a gate of the same size."""
    s = w.shape
    w.matrix(f"{block}.attn_q", 2 * s.n_head * s.head, s.n_embd)
    w.matrix(f"{block}.attn_k", s.n_head_kv * s.head, s.n_embd)
    w.matrix(f"{block}.attn_v", s.n_head_kv * s.head, s.n_embd)
    w.matrix(f"{block}.attn_output", s.n_embd, s.n_head * s.head)
    w.norm(f"{block}.attn_q_norm", s.head, SHARPNESS)
    w.norm(f"{block}.attn_k_norm", s.head, SHARPNESS)


def _delta_net(w: _Writer, block: str) -> None:
    """A gated delta net: `n_head_kv` heads of keys, `n_head` heads of values, a convolution of 4."""
    s = w.shape
    keys, values = s.n_head_kv * s.head, s.n_head * s.head
    w.matrix(f"{block}.attn_qkv", 2 * keys + values, s.n_embd)
    w.matrix(f"{block}.attn_gate", values, s.n_embd)
    w.put(
        f"{block}.ssm_conv1d.weight",
        0.5 * w.random.standard_normal((2 * keys + values, 4), dtype=np.float32),
    )
    w.vector(f"{block}.ssm_dt.bias", s.n_head, 0.0, 0.5)
    w.put(f"{block}.ssm_a", -np.exp(0.5 * w.random.standard_normal(s.n_head, dtype=np.float32)))
    if w.arch == "qwen3next":
        w.matrix(f"{block}.ssm_ba", 2 * s.n_head, s.n_embd)
    else:
        w.matrix(f"{block}.ssm_beta", s.n_head, s.n_embd)
        w.matrix(f"{block}.ssm_alpha", s.n_head, s.n_embd)
    w.norm(f"{block}.ssm_norm", s.head)
    w.matrix(f"{block}.ssm_out", s.n_embd, values)


def _hybrid(w: _Writer, block: str, layer: int) -> None:
    s = w.shape
    w.norm(f"{block}.attn_norm", s.n_embd)
    if layer >= s.n_layers:
        _gated_attention(w, block)
        w.matrix(f"{block}.nextn.eh_proj", s.n_embd, 2 * s.n_embd)
        w.norm(f"{block}.nextn.enorm", s.n_embd)
        w.norm(f"{block}.nextn.hnorm", s.n_embd)
    elif (layer + 1) % s.full_attention_every:
        _delta_net(w, block)
    else:
        _gated_attention(w, block)
    w.norm(f"{block}.post_attention_norm", w.shape.n_embd)
    if w.arch == "qwen35":
        _feed_forward(w, block)
    else:
        _experts(w, block, shared=True)


_LAYERS: dict[str, Callable[[_Writer, str, int], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "qwen3next": _hybrid,
    "qwen35": _hybrid,
    "qwen35moe": _hybrid,
    "smollm3": _llama,
}
_MIXTURES = ("qwen2moe", "qwen3moe", "gpt-oss", "qwen3next", "qwen35moe")
_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")


def _metadata(w: _Writer) -> None:
    s = w.shape
    # no name of a known family: llama.cpp looks for that family's special tokens then
    w.out.add_name("random model")
    w.key("block_count", s.n_layers + s.n_prediction)
    if s.n_prediction:
        w.key("nextn_predict_layers", s.n_prediction)
    w.key("context_length", N_CTX_TRAIN)
    w.key("embedding_length", s.n_embd)
    w.key("feed_forward_length", s.n_ff)
    w.key("attention.head_count", s.n_head)
    w.key("attention.head_count_kv", s.n_head_kv)
    w.key("attention.key_length", s.head)
    w.key("attention.value_length", s.head)
    w.key("attention.layer_norm_rms_epsilon", 1e-6)
    w.key("rope.dimension_count", s.head)
    w.key("rope.freq_base", 10000.0)
    if w.arch in _MIXTURES:
        w.key("expert_count", s.n_expert)
        w.key("expert_used_count", s.n_expert_used)
        w.key("expert_feed_forward_length", s.n_ff_exp)
        if w.arch not in ("qwen3moe", "gpt-oss"):
            w.key("expert_shared_feed_forward_length", s.n_ff_exp)
    if w.arch in _HYBRIDS:
        w.key("full_attention_interval", s.full_attention_every)
        w.key("ssm.conv_kernel", 4)
        w.key("ssm.state_size", s.head)
        w.key("ssm.group_count", s.n_head_kv)
        w.key("ssm.time_step_rank", s.n_head)
        w.key("ssm.inner_size", s.n_head * s.head)
    if w.arch in ("qwen35", "qwen35moe"):
        # 4 of them, like the layers of a short model: they must not be taken for one per layer
        w.key("rope.dimension_sections", [6, 5, 5, 0])
    if w.arch in ("gemma3", "gpt-oss"):
        w.key("attention.sliding_window", SLIDING_WINDOW)
    if w.arch == "gemma3":
        w.key("rope.freq_base_swa", 1000.0)
    if w.arch == "phi3":
        w.key("rope.scaling.original_context_length", N_CTX_TRAIN)
    for key, value in s.extra.items():
        w.out.kv_data[0].pop(f"{w.arch}.{key}", None)
        w.key(key, value)


def _tokeniser(w: _Writer) -> int:
    tokens, kinds, merges = vocabulary()
    w.out.add_tokenizer_model("gpt2")
    w.out.add_tokenizer_pre("gpt-2")
    w.out.add_token_list(tokens)
    w.out.add_token_types(kinds)
    w.out.add_token_merges(merges)
    w.out.add_bos_token_id(tokens.index("<|endoftext|>"))
    w.out.add_eos_token_id(tokens.index("<|im_end|>"))
    w.out.add_pad_token_id(tokens.index("<|endoftext|>"))
    w.out.add_add_bos_token(False)
    w.out.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def write_random_model(
    path: Path,
    arch: str,
    *,
    n_layers: int | None = None,
    quant: str = "f32",
    seed: int = 0,
    tied: bool | None = None,
    prediction_layers: int = 0,
    split_tensors: int = 0,
    full_attention_every: int = FULL_ATTENTION_EVERY,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a random model of `arch` (one of CUTTABLE, or UNCUTTABLE) to `path`; returns `path`.

    `extra` adds metadata under the architecture's name; `prediction_layers` appends next-token-prediction
    blocks (qwen35, qwen35moe); with `split_tensors` the model is written in parts of so many tensors, and the
    first part's path is returned. The same arguments give the same bytes. Control tokens have small output
    rows, so that greedy decoding does not end by itself.
    """
    wide = quant == "q4_k"
    shape = Shape(
        n_layers=n_layers or DEFAULT_LAYERS.get(arch, 8),
        n_embd=256 if wide else 128,
        n_ff=256 if wide else 192,
        head=64 if wide else 32,
        n_ff_exp=256 if wide else 32,
        tied=arch == "gemma3" if tied is None else tied,
        n_prediction=prediction_layers,
        full_attention_every=full_attention_every,
        extra=extra or {},
    )
    w = _Writer(path, arch, shape, quant, seed, split_tensors)
    _metadata(w)
    w.out.add_file_type(
        {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14}[quant]
    )
    n_vocab = _tokeniser(w)
    plain = n_vocab - len(_SPECIAL)
    scale = np.ones((n_vocab, 1), dtype=np.float32)
    scale[plain:] = 0.02
    quant_of_rows = "q8_0" if wide else quant
    # gemma3 multiplies its embedding by the root of its width
    std = 0.4 / float(np.sqrt(shape.n_embd)) if arch == "gemma3" else 1.0
    embedding = np.float32(std) * w.random.standard_normal((n_vocab, shape.n_embd), dtype=np.float32)
    w.put("token_embd.weight", embedding * scale if shape.tied else embedding, quant_of_rows)
    if arch == "llama":
        w.put("rope_freqs.weight", np.linspace(1, 8, shape.head // 2, dtype=np.float32))
    if arch == "phi3":
        for kind in ("long", "short"):
            w.put(f"rope_factors_{kind}.weight", 1 + w.random.random(shape.head // 2, dtype=np.float32))
    for layer in range(shape.n_layers + prediction_layers):
        _LAYERS[arch](w, f"blk.{layer}", layer)
    w.norm("output_norm", shape.n_embd, 1.0 if not shape.tied else 4.0)
    if not shape.tied:
        output = w.random.standard_normal((n_vocab, shape.n_embd), dtype=np.float32) * scale
        w.put("output.weight", output / np.float32(np.sqrt(shape.n_embd)) * 4, quant_of_rows)
    w.out.write_header_to_file()
    w.out.write_kv_data_to_file()
    w.out.write_tensors_to_file()
    w.out.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split_tensors else path


def random_model(folder: Path, arch: str, **options: Any) -> Path:
    """The model of these options in `folder`, written once; meant for a folder that a test session shares."""
    label = hashlib.sha256(repr((arch, sorted(options.items()))).encode()).hexdigest()[:12]
    path = folder / f"{arch}-{label}.gguf"
    if not path.exists():
        write_random_model(path.with_suffix(".part"), arch, **options).replace(path)
    return path
