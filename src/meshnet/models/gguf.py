"""Reading GGUF files: what a model is, and where each of its tensors lies.

Only headers are read, never tensor data. A split model is one model over several files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gguf.constants as ggml
import msgspec

from meshnet.models.errors import BadGGUF, MissingPart, ModelError, ModelNotFound, TruncatedGGUF
from meshnet.models.header import (
    MAX_HEADER_BYTES,
    TYPE_NAMES,
    Cursor,
    Tensor,
    alignment_of,
    check_shape,
    parse_header,
    read_value,
    tensor_bytes,
)
from meshnet.models.metadata import Entry, Metadata

MAX_PARTS = 1 << 10
MAX_LAYERS = 1 << 12

_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_NO_HASH = "0" * 64
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a model; `path` is None where the model is known by its manifest only."""

    name: str
    n_bytes: int
    path: Path | None


def _bytes_at(data: bytes, offset: int, length: int) -> bytes:
    return data[offset : offset + length]


class _ManifestTensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    file_index: int
    offset: int


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    files: list[tuple[str, int]]
    metadata: list[tuple[str, int, bytes]]
    tensors: list[_ManifestTensor]
    fingerprint: str
    hashes: dict[str, str]


_MANIFEST_VERSION = 1


@dataclass(frozen=True)
class ModelFile:
    """A model as its GGUF file, or the parts of its split GGUF, describe it. Immutable; holds no open files.

    `fingerprint` and `tensor_hashes` (name -> sha256 in hex) are known where the model came from a manifest
    that carried them; for a local file they are computed by `meshnet.models.fingerprint`. Of a slice,
    `fingerprint` is that of the whole model.
    """

    files: tuple[SourceFile, ...]
    metadata: Metadata
    tensors: tuple[Tensor, ...]
    fingerprint: str = ""
    tensor_hashes: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def open(path: str | Path) -> ModelFile:
        """Read a GGUF; of a split one, any part will do, the others are looked for beside it.

        Raises ModelNotFound, NotGGUF, TruncatedGGUF, BadGGUF or MissingPart.
        """
        return _open(Path(path))

    @property
    def name(self) -> str:
        """The file's name without its ending and, for a split model, without the part number."""
        split = _SPLIT_NAME.match(self.files[0].name)
        return split["stem"] if split else self.files[0].name.removesuffix(".gguf")

    @property
    def path(self) -> Path:
        """The first file. Raises ModelError for a model without local files."""
        path = self.files[0].path
        if path is None:
            raise ModelError(f"{self.name}: known by its manifest only, the file is not on this machine")
        return path

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine, rather than described by a manifest."""
        return all(file.path is not None for file in self.files)

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.n_bytes for file in self.files)

    @cached_property
    def arch(self) -> str:
        return self.metadata.text("general.architecture") or ""

    @cached_property
    def n_blocks(self) -> int:
        """Blocks in the file, prediction blocks behind the model's own layers included."""
        return self._arch_integer("block_count") or 0

    @cached_property
    def n_layers(self) -> int:
        """Layers that a forward pass runs: the blocks without the appended next-token-prediction ones."""
        return self.n_blocks - (self._arch_integer("nextn_predict_layers") or 0)

    @cached_property
    def n_embd(self) -> int:
        return self._arch_integer("embedding_length") or 0

    @cached_property
    def n_ctx_train(self) -> int:
        return self._arch_integer("context_length") or 0

    @cached_property
    def n_vocab(self) -> int:
        embedding = self.by_name.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            return embedding.shape[1]
        if "tokenizer.ggml.tokens" in self.metadata:
            return self.metadata.entry("tokenizer.ggml.tokens").array_length or 0
        return self._arch_integer("vocab_size") or 0

    @cached_property
    def quantisation(self) -> str:
        """A label such as `Q4_1`: what the file says, else the type that most of its bytes have."""
        stated = self.metadata.integer("general.file_type")
        for kind in ggml.LlamaFileType:
            if stated is not None and int(kind) == stated and kind.name != "GUESSED":
                return str(kind.name).removeprefix("MOSTLY_").removeprefix("ALL_")
        sizes: dict[int, int] = {}
        for tensor in self.tensors:
            sizes[tensor.ggml_type] = sizes.get(tensor.ggml_type, 0) + tensor.n_bytes
        return TYPE_NAMES[max(sizes, key=lambda kind: sizes[kind])] if sizes else "unknown"

    @cached_property
    def chat_template(self) -> str | None:
        return self.metadata.text("tokenizer.chat_template")

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the tensors of each layer."""
        sizes = [0] * self.n_layers
        for tensor in self.tensors:
            layer = tensor.layer
            if layer is not None and layer < self.n_layers:
                sizes[layer] += tensor.n_bytes
        return tuple(sizes)

    @cached_property
    def embedding_bytes(self) -> int:
        """Bytes that only the head needs."""
        return sum(tensor.n_bytes for tensor in self.tensors if tensor.is_head)

    @cached_property
    def output_bytes(self) -> int:
        """Bytes that only the tail needs: norm and output matrix, which is the embedding in a tied model."""
        own = sum(tensor.n_bytes for tensor in self.tensors if tensor.is_tail)
        return own + (self.by_name["token_embd.weight"].n_bytes if self.tied else 0)

    @cached_property
    def tied(self) -> bool:
        """The embedding matrix serves as the output matrix too."""
        return "output.weight" not in self.by_name and "token_embd.weight" in self.by_name

    @property
    def shard_range(self) -> tuple[int, int] | None:
        """The layers of the whole model that this file holds, if it is a slice made by meshnet, else None."""
        first, last = (self.metadata.integer(f"meshnet.{key}") for key in ("first_layer", "last_layer"))
        return None if first is None or last is None else (first, last)

    @property
    def filler_before(self) -> int:
        """Blocks of zeros in front of a shard's own layers (see `meshnet.models.slice`); else 0."""
        return self.metadata.integer("meshnet.filler_before") or 0

    def _arch_integer(self, key: str) -> int | None:
        return self.metadata.integer(f"{self.arch}.{key}")

    def to_manifest(self, *, fingerprint: str = "", tensor_hashes: dict[str, str] | None = None) -> bytes:
        """All that a machine without the file needs to plan and verify a slice of it (msgpack)."""
        manifest = _Manifest(
            version=_MANIFEST_VERSION,
            files=[(file.name, file.n_bytes) for file in self.files],
            metadata=[(key, entry.kind, entry.raw) for key, entry in self.metadata.entries().items()],
            tensors=[
                _ManifestTensor(t.name, t.shape, t.ggml_type, t.n_bytes, t.file_index, t.offset)
                for t in self.tensors
            ],
            fingerprint=fingerprint or self.fingerprint,
            hashes=tensor_hashes if tensor_hashes is not None else dict(self.tensor_hashes),
        )
        return msgspec.msgpack.encode(manifest)

    @staticmethod
    def from_manifest(data: bytes) -> ModelFile:
        """The model that `to_manifest` described. Raises BadGGUF for anything else.

        A manifest comes from another machine: everything that a file's header is checked for is checked here.
        """
        if len(data) > MAX_HEADER_BYTES:
            raise BadGGUF(f"model manifest: {len(data)} bytes, more than the {MAX_HEADER_BYTES} allowed")
        try:
            manifest = msgspec.msgpack.decode(data, type=_Manifest)
        except msgspec.MsgspecError as error:
            raise BadGGUF(f"model manifest: not readable ({error}); ask for it again") from error
        if manifest.version != _MANIFEST_VERSION:
            raise BadGGUF(
                f"model manifest: version {manifest.version}, this meshnet reads {_MANIFEST_VERSION}; "
                "run the same meshnet version on both machines"
            )
        entries: dict[str, Entry] = {}
        for key, kind, raw in manifest.metadata:
            cursor = Cursor("model manifest", len(raw), partial(_bytes_at, raw))
            try:
                entry = read_value(cursor, key, kind)
            except TruncatedGGUF as error:
                raise BadGGUF(f"model manifest: {key} is shorter than it says; ask for it again") from error
            if cursor.at != len(raw):
                raise BadGGUF(f"model manifest: {key} is longer than it says; ask for it again")
            entries[key] = entry
        if not all(
            _SHA256.match(each) for each in (manifest.fingerprint or _NO_HASH, *manifest.hashes.values())
        ):
            raise BadGGUF("model manifest: a hash in it is no sha256 in hex; ask for it again")
        files = tuple(SourceFile(Path(name).name, size, None) for name, size in manifest.files)
        tensors = []
        for item in manifest.tensors:
            tensor = Tensor(item.name, item.shape, item.ggml_type, item.n_bytes, item.file_index, item.offset)
            check_shape("model manifest", tensor.name, tensor.shape, tensor.ggml_type)
            in_file = 0 <= tensor.file_index < len(files) and tensor.offset >= 0
            if not in_file or tensor.offset + tensor.n_bytes > files[tensor.file_index].n_bytes:
                raise BadGGUF(f"model manifest: {tensor.name} lies outside its file; ask for it again")
            if tensor.n_bytes != tensor_bytes(tensor.shape, tensor.ggml_type):
                raise BadGGUF(f"model manifest: {tensor.name} has a wrong size; ask for it again")
            tensors.append(tensor)
        model = ModelFile(
            files,
            Metadata(entries),
            tuple(tensors),
            manifest.fingerprint,
            tuple(sorted(manifest.hashes.items())),
        )
        _check_model("model manifest", model)
        return model


def _read_part(path: Path, file_index: int) -> tuple[SourceFile, Metadata, list[Tensor]]:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)

            def read(offset: int, length: int) -> bytes:
                stream.seek(offset)
                return stream.read(length)

            metadata, tensors = parse_header(str(path), size, read, file_index)
            return SourceFile(path.name, size, path), metadata, tensors
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> ModelFile:
    if path.is_dir():
        raise ModelNotFound(f"{path}: a folder, not a file; give the .gguf file in it")
    part = _read_part(path, 0)
    count = part[1].integer("split.count") or 1
    if count == 1:
        return assemble(str(path), [part])
    split = _SPLIT_NAME.match(path.name)
    if not 1 < count <= MAX_PARTS or split is None or int(split["count"]) != count:
        raise MissingPart(
            f"{path}: says it is one of {count} parts, but is not named …-0000N-of-{count:05d}.gguf; "
            "give the parts their original names, or merge them (gguf-split --merge)"
        )
    paths = [path.with_name(f"{split['stem']}-{part + 1:05d}-of-{count:05d}.gguf") for part in range(count)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise MissingPart(
            f"{path}: {len(missing)} of {count} parts are missing: {', '.join(missing[:8])}; "
            f"put them into {path.parent}"
        )
    return assemble(str(path), [_read_part(each, index) for index, each in enumerate(paths)])


def assemble(label: str, parts: Sequence[tuple[SourceFile, Metadata, list[Tensor]]]) -> ModelFile:
    """The model that the parsed headers of all its files make up; `label` names it in errors.

    Raises MissingPart where they are not the parts of one model, BadGGUF where it is no usable model.
    """
    tensors = [tensor for _, _, own in parts for tensor in own]
    entries = parts[0][1].entries()
    for index, (file, metadata, _) in enumerate(parts):
        place = (metadata.integer("split.no") or 0, metadata.integer("split.count") or 1)
        if place != (index, len(parts)):
            raise MissingPart(
                f"{file.name}: is part {place[0] + 1} of {place[1]} by its own metadata, "
                f"not {index + 1} of {len(parts)}; fetch this part again"
            )
    claimed = parts[0][1].integer("split.tensors.count")
    if len(parts) > 1 and claimed is not None and claimed != len(tensors):
        raise MissingPart(
            f"{label}: the parts hold {len(tensors)} tensors, {claimed} are announced; "
            "the parts belong to different models, fetch them again"
        )
    whole = Metadata({key: entry for key, entry in entries.items() if not key.startswith("split.")})
    stated = whole.text("meshnet.fingerprint") if "meshnet.first_layer" in whole else None
    shard_of = stated if stated and _SHA256.match(stated) else ""
    model = ModelFile(tuple(file for file, _, _ in parts), whole, tuple(tensors), shard_of)
    _check_model(label, model)
    return model


def _check_model(label: str, model: ModelFile) -> None:
    """A header can be well-formed and still not describe a model that anything here could use."""
    alignment_of(label, model.metadata)
    if not model.arch:
        raise BadGGUF(f"{label}: names no general.architecture; give a language model")
    if len(model.by_name) != len(model.tensors):
        raise BadGGUF(f"{label}: a tensor stands twice; the file is damaged")
    if not 1 <= model.n_layers <= model.n_blocks <= MAX_LAYERS:
        raise BadGGUF(
            f"{label}: {model.arch}.block_count is {model.n_blocks}, {model.n_layers} of them layers; "
            "give a language model (not an adapter, a vocabulary or a projector)"
        )
    if model.n_embd < 1:
        raise BadGGUF(f"{label}: {model.arch}.embedding_length is missing; give a language model")
    beyond = [t.name for t in model.tensors if t.layer is not None and t.layer >= model.n_blocks]
    if beyond:
        raise BadGGUF(f"{label}: {beyond[0]} lies beyond the {model.n_blocks} blocks; the file is damaged")
    present = {tensor.layer for tensor in model.tensors}
    absent = [layer for layer in range(model.n_layers) if layer not in present]
    if absent:
        raise BadGGUF(f"{label}: no tensors for layer {absent[0]}; give a whole model, not a part of one")


def model_info(model: ModelFile) -> dict[str, Any]:
    """What `model ls` and the API show of a model, JSON-ready."""
    return {
        "name": model.name,
        "arch": model.arch,
        "layers": model.n_layers,
        "embedding": model.n_embd,
        "vocabulary": model.n_vocab,
        "context": model.n_ctx_train,
        "quantisation": model.quantisation,
        "bytes": model.n_bytes,
        "parts": len(model.files),
    }
