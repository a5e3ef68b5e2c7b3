"""A shard's file: which bytes of the source it needs, and the header that makes them a model of their own.

The plan is made from the header alone, so that the same plan serves a local copy and a fetch by range from
another machine. A shard has the metadata of its model with the number of layers changed, arrays per layer cut
to the range, and `blk.i.*` renumbered from 0; layers whose kind followed from their number get it in writing.

What llama.cpp demands of any file but a shard in the middle never reads (the embedding, the output norm) is
filler: a hole in a sparse file, nothing to download and nothing on the disk. A shard that is neither head nor
tail has no vocabulary either, so that its embedding has 32 rows instead of 100,000 and more.

llama.cpp aborts on a model whose layers are of two kinds (recurrent and attention; sliding window and full)
when one kind is absent, as in a short shard. Such a shard gets one layer of the missing kind that is all
zeros (again a hole), so that it adds nothing to the stream. It stands behind the shard's own layers, where a
stage that stops at its last layer never runs it; in a tail it stands in front, because llama.cpp computes the
last layer for the sampled rows only, which rounds differently. `meshnet.filler_before` says how many are in
front.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshnet.models.architecture import (
    PER_LAYER_KEYS,
    RECURRENT_KEY,
    SLIDING_KEY,
    architecture,
    model_refusal,
    recurrent_layers,
    sliding_layers,
)
from meshnet.models.errors import LayersOutside, ModelError, TruncatedGGUF, Uncuttable
from meshnet.models.files import sync_folder
from meshnet.models.gguf import ModelFile
from meshnet.models.header import QUANT_SIZES, Tensor, alignment_of, tensor_bytes
from meshnet.models.metadata import ARRAY, BOOL, STRING, UINT32, Entry, array_entry, encode_pair, scalar_entry

F32, Q4_0, IQ1_S = 0, 2, 19
MIDDLE_VOCABULARY = 32
COPY_CHUNK = 4 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to copy: `length` bytes at `offset` of source file `file_index` go to `target_offset`."""

    source_name: str
    name: str
    file_index: int
    offset: int
    length: int
    target_offset: int


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How to make the shard `first..last` (inclusive) of `model`. `header` goes to offset 0 of the target.

    `n_bytes` is the target's apparent size; `copy_bytes` is read or fetched; `filler_bytes` are holes.
    """

    model: ModelFile
    first: int
    last: int
    header: bytes
    pieces: tuple[Piece, ...]
    n_bytes: int
    filler_bytes: int

    @property
    def copy_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.model.n_layers - 1


def check_range(model: ModelFile, first: int, last: int) -> None:
    """Raise LayersOutside unless `first..last` are layers of the model."""
    if not 0 <= first <= last < model.n_layers:
        raise LayersOutside(
            f"{model.name} has layers 0-{model.n_layers - 1}; {first}-{last} is not a range of them"
        )


def plan_slice(model: ModelFile, first: int, last: int, *, fingerprint: str = "") -> SlicePlan:
    """Plan the shard `first..last`, both inclusive. Reads nothing but the header that `model` already holds.

    `fingerprint` is the whole model's; the shard carries it, so that nodes can tell whose shard it is.
    A slice of a slice is refused (Uncuttable): the plan always starts from the whole model.
    Raises LayersOutside and Uncuttable.
    """
    if model.shard_range is not None:
        held = "{}-{}".format(*model.shard_range)
        of = model.metadata.integer("meshnet.model_layers")
        raise Uncuttable(
            f"{model.name}: is itself a slice, layers {held} of {of}; slice the whole model's file"
        )
    check_range(model, first, last)
    if reason := model_refusal(model):
        raise Uncuttable(reason)
    tail = last == model.n_layers - 1
    own, extra = list(range(first, last + 1)), _filler_layers(model, first, last)
    before = len(extra) if tail else 0
    layers = [*extra, *own] if tail else [*own, *extra]
    entries = _shard_metadata(model, layers, first, last, fingerprint or model.fingerprint)
    entries["meshnet.filler_before"] = scalar_entry(UINT32, before)
    if first > 0 and not tail:
        entries = _without_vocabulary(model.arch, entries)
    infos = [
        _Info(_renumbered(tensor.name, first - before), tensor.shape, tensor.ggml_type, tensor)
        for tensor in model.tensors
        if _belongs(model, tensor, first, last)
    ]
    infos += _fillers(model, {info.name for info in infos}, tail)
    for position, layer in enumerate(extra, 0 if tail else len(own)):
        infos += _zero_layer(model, layer, position)
    return _lay_out(model, first, last, entries, infos)


@dataclass(frozen=True, slots=True)
class _Info:
    """A tensor of the shard; without a source it is a hole."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    source: Tensor | None


def _filler_layers(model: ModelFile, first: int, last: int) -> list[int]:
    """For each kind of layer that the shard must have and lacks: a layer of the model with its shapes."""
    known = architecture(model.arch)
    if known.recurrent:
        kinds, needed = recurrent_layers(model), {True, False}
    else:
        kinds, needed = sliding_layers(model), {True} & set(sliding_layers(model))
    missing = needed - set(kinds[first : last + 1])
    return [kinds.index(kind) for kind in sorted(missing) if kind in kinds]


def _fillers(model: ModelFile, present: set[str], tail: bool) -> list[_Info]:
    """What llama.cpp demands and the shard does not use."""
    is_head = "token_embd.weight" in present
    kind = _filler_type(model.n_embd)
    infos: list[_Info] = []
    if not is_head:
        rows = model.n_vocab if tail else MIDDLE_VOCABULARY
        infos.append(_Info("token_embd.weight", (model.n_embd, rows), kind, None))
    if "output_norm.weight" not in present:
        infos.append(_Info("output_norm.weight", (model.n_embd,), F32, None))
    if architecture(model.arch).demands_output and "output.weight" not in present:
        rows = model.n_vocab if is_head else MIDDLE_VOCABULARY
        infos.append(_Info("output.weight", (model.n_embd, rows), kind, None))
    return infos


def _zero_layer(model: ModelFile, layer: int, position: int) -> list[_Info]:
    """Holes with the shapes of layer `layer`, as block `position` of a shard."""
    infos: list[_Info] = []
    for tensor in model.tensors:
        if tensor.layer == layer:
            plain = len(tensor.shape) == 1 or tensor.ggml_type == F32
            kind = F32 if plain else _filler_type(tensor.shape[0])
            infos.append(_Info(_renumbered(tensor.name, layer - position), tensor.shape, kind, None))
    return infos


def _belongs(model: ModelFile, tensor: Tensor, first: int, last: int) -> bool:
    layer = tensor.layer
    if layer is not None:
        return first <= layer <= last
    if tensor.is_head:
        as_output = tensor.name == "token_embd.weight" and model.tied and last == model.n_layers - 1
        return first == 0 or as_output
    return not tensor.is_tail or last == model.n_layers - 1


def _renumbered(name: str, by: int) -> str:
    if not name.startswith("blk."):
        return name
    _, layer, rest = name.split(".", 2)
    return f"blk.{int(layer) - by}.{rest}"


def _filler_type(row: int) -> int:
    """The type of a tensor of zeros: the smallest one that the length of its rows allows."""
    return next((kind for kind in (IQ1_S, Q4_0) if row % QUANT_SIZES[kind][0] == 0), F32)


def _shard_metadata(
    model: ModelFile, layers: list[int], first: int, last: int, fingerprint: str
) -> dict[str, Entry]:
    arch = model.arch
    known = architecture(arch)
    entries = {
        key: entry
        for key, entry in model.metadata.entries().items()
        if not key.startswith(("split.", "meshnet."))
    }

    def put(key: str, value: int) -> None:
        entries[f"{arch}.{key}"] = scalar_entry(entries[f"{arch}.{key}"].kind, value)

    put("block_count", len(layers))
    if f"{arch}.nextn_predict_layers" in entries:
        put("nextn_predict_layers", 0)
    for key in PER_LAYER_KEYS:
        entry = entries.get(f"{arch}.{key}")
        if entry is not None and entry.kind == ARRAY:
            entries[f"{arch}.{key}"] = entry.pick(layers)
    if known.recurrent:
        recurrent = recurrent_layers(model)
        entries[f"{arch}.{RECURRENT_KEY}"] = array_entry(BOOL, [recurrent[layer] for layer in layers])
    if known.full_window_every and model.metadata.integer(f"{arch}.attention.sliding_window"):
        sliding = sliding_layers(model)
        entries[f"{arch}.{SLIDING_KEY}"] = array_entry(BOOL, [sliding[layer] for layer in layers])
    for key, number in (("first_layer", first), ("last_layer", last), ("model_layers", model.n_layers)):
        entries[f"meshnet.{key}"] = scalar_entry(UINT32, number)
    if fingerprint:
        entries["meshnet.fingerprint"] = scalar_entry(STRING, fingerprint)
    return entries


def _without_vocabulary(arch: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    kept = {key: entry for key, entry in entries.items() if not key.startswith("tokenizer.")}
    kept["tokenizer.ggml.model"] = scalar_entry(STRING, "no_vocab")
    kept[f"{arch}.vocab_size"] = scalar_entry(UINT32, MIDDLE_VOCABULARY)
    return kept


def _lay_out(
    model: ModelFile,
    first: int,
    last: int,
    entries: dict[str, Entry],
    infos: list[_Info],
) -> SlicePlan:
    alignment = alignment_of(model.name, model.metadata)

    def aligned(offset: int) -> int:
        return (offset + alignment - 1) // alignment * alignment

    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(entries)))
    for key, entry in entries.items():
        header += encode_pair(key, entry)
    offsets: list[int] = []
    end = 0
    for info in infos:
        label = info.name.encode("utf-8", "surrogateescape")
        header += struct.pack("<Q", len(label)) + label
        header += struct.pack(f"<I{len(info.shape)}QIQ", len(info.shape), *info.shape, info.ggml_type, end)
        offsets.append(end)
        end = aligned(end + tensor_bytes(info.shape, info.ggml_type))
    header += bytes(aligned(len(header)) - len(header))
    pieces: list[Piece] = []
    filler = 0
    for info, offset in zip(infos, offsets, strict=True):
        source = info.source
        if source is None:
            filler += tensor_bytes(info.shape, info.ggml_type)
            continue
        target = len(header) + offset
        pieces.append(Piece(source.name, info.name, source.file_index, source.offset, source.n_bytes, target))
    return SlicePlan(model, first, last, bytes(header), tuple(pieces), len(header) + end, filler)


def write_slice(plan: SlicePlan, out: str | Path, progress: Progress | None = None) -> Path:
    """Write the shard to `out` from the model's local files; returns `out`.

    The file appears under its name only when it is complete and on the disk. Raises ModelError where the
    source cannot be read or the target not be written.
    """
    out = Path(out)
    total, done = plan.copy_bytes, 0
    handle, temporary = -1, ""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent)
        with ExitStack() as stack:
            target = stack.enter_context(os.fdopen(handle, "wb"))
            sources = [stack.enter_context(_open_source(file.path)) for file in plan.model.files]
            target.write(plan.header)
            for piece in plan.pieces:
                source = sources[piece.file_index]
                source.seek(piece.offset)
                target.seek(piece.target_offset)
                left = piece.length
                while left:
                    chunk = source.read(min(COPY_CHUNK, left))
                    if not chunk:
                        name = plan.model.files[piece.file_index].name
                        raise TruncatedGGUF(f"{name}: ended within {piece.source_name}; fetch the file again")
                    target.write(chunk)
                    left -= len(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, total)
            target.truncate(plan.n_bytes)
            target.flush()
            os.fsync(target.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error.strerror or error}; free some space") from error
    finally:
        with suppress(OSError):
            if temporary:
                Path(temporary).unlink()
    return out


def _open_source(path: Path | None) -> BinaryIO:
    if path is None:
        raise ModelError("the model's file is not on this machine; fetch the shard from a node that has it")
    return path.open("rb")
