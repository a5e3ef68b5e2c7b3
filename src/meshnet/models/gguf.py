"""Reading GGUF files: what a model is, and where each of its tensors lies.

Only headers are read, never tensor data. The reader is our own because reading a header must be quick on
large vocabularies and must not trust the file: every count and length is checked against the bytes that are
really there before anything is allocated. Type names and block sizes come from the `gguf` package.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import gguf.constants as ggml
import msgspec

from meshnet.models.errors import BadGGUF, MissingPart, ModelError, ModelNotFound, NotGGUF, TruncatedGGUF
from meshnet.models.metadata import ARRAY, SCALAR_SIZE, STRING, Entry, Metadata

DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 512 << 20
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1 << 10
MAX_STRINGS = 1 << 24
MAX_PARTS = 1 << 10
MAX_LAYERS = 1 << 12

_CHUNK = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_LAYER_NAME = re.compile(r"^blk\.(\d{1,6})\.(.+)$", re.DOTALL)
_HEAD_TENSORS = ("token_embd", "token_types", "position_embd")
_TAIL_TENSORS = ("output",)

QUANT_SIZES: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in ggml.GGML_QUANT_SIZES.items()}
TYPE_NAMES: dict[int, str] = {int(kind): str(kind.name) for kind in ggml.GGML_QUANT_SIZES}


def tensor_bytes(shape: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of a tensor of this shape (row length first); ValueError if its rows do not fill blocks."""
    block, size = QUANT_SIZES[ggml_type]
    if shape[0] % block:
        raise ValueError(f"rows of {shape[0]} do not fill blocks of {block}")
    count = 1
    for extent in shape:
        count *= extent
    return count // block * size


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `shape` in ggml order (row length first), `offset` in bytes from the start of its file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    file_index: int
    offset: int

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.ggml_type]

    @property
    def layer(self) -> int | None:
        """The layer it belongs to, or None."""
        match = _LAYER_NAME.match(self.name)
        return int(match[1]) if match else None

    @property
    def is_head(self) -> bool:
        """Needed where tokens become rows."""
        return self.name.startswith(_HEAD_TENSORS)

    @property
    def is_tail(self) -> bool:
        """Needed where rows become logits."""
        return self.name.startswith(_TAIL_TENSORS)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a model; `path` is None where the model is known by its manifest only."""

    name: str
    n_bytes: int
    path: Path | None


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

    `fingerprint` and `tensor_hashes` (name -> sha256 in hex) are known only where the model came from a
    manifest that carried them; for a local file they are computed by `meshnet.models.fingerprint`.
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
            cursor = _Cursor("model manifest", len(raw), partial(_bytes_at, raw))
            entry = _read_value(cursor, key, kind)
            if cursor.at != len(raw):
                raise BadGGUF(f"model manifest: {key} is longer than it says; ask for it again")
            entries[key] = entry
        files = tuple(SourceFile(Path(name).name, size, None) for name, size in manifest.files)
        tensors = []
        for item in manifest.tensors:
            tensor = Tensor(item.name, item.shape, item.ggml_type, item.n_bytes, item.file_index, item.offset)
            _check_shape("model manifest", tensor.name, tensor.shape, tensor.ggml_type)
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


def _bytes_at(data: bytes, offset: int, length: int) -> bytes:
    return data[offset : offset + length]


class _Cursor:
    """Takes bytes in order from something that can be read by range, and never asks beyond its end."""

    def __init__(self, label: str, size: int, read: Callable[[int, int], bytes]) -> None:
        self.label = label
        self.size = size
        self.at = 0
        self._read = read
        self._base = 0
        self._buffer = b""

    def need(self, length: int, what: str) -> None:
        """Refuse to go on when fewer than `length` bytes are left."""
        if length > self.size - self.at:
            raise TruncatedGGUF(
                f"{self.label}: ends after {self.size} bytes, in the middle of {what}; "
                "the download was cut short, fetch the file again"
            )
        if self.at + length > MAX_HEADER_BYTES:
            raise BadGGUF(
                f"{self.label}: a header of more than {MAX_HEADER_BYTES} bytes ({what}); the file is damaged"
            )

    def take(self, length: int, what: str) -> bytes:
        self.need(length, what)
        start = self.at - self._base
        if start + length > len(self._buffer):
            want = min(max(length, _CHUNK), self.size - self.at)
            self._buffer, self._base, start = self._read(self.at, want), self.at, 0
            if len(self._buffer) < length:
                raise TruncatedGGUF(f"{self.label}: ended while it was read, at {what}; fetch the file again")
        self.at += length
        return self._buffer[start : start + length]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def name(self, what: str) -> str:
        length = self.u64(what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise BadGGUF(f"{self.label}: {what} of {length} bytes; the file is damaged, fetch it again")
        return self.take(length, what).decode("utf-8", "surrogateescape")


def _read_value(cursor: _Cursor, key: str, kind: int) -> Entry:
    if kind in SCALAR_SIZE:
        return Entry(kind, cursor.take(SCALAR_SIZE[kind], key))
    if kind == STRING:
        length = cursor.u64(key)
        return Entry(kind, _U64.pack(length) + cursor.take(length, key))
    if kind != ARRAY:
        raise BadGGUF(f"{cursor.label}: {key} has the unknown type {kind}; the file is damaged or too new")
    element = cursor.u32(key)
    count = cursor.u64(key)
    head = struct.pack("<IQ", element, count)
    if element in SCALAR_SIZE:
        return Entry(kind, head + cursor.take(count * SCALAR_SIZE[element], key))
    if element != STRING:
        raise BadGGUF(f"{cursor.label}: {key} is an array of the unknown type {element}; the file is damaged")
    if count > MAX_STRINGS:
        raise BadGGUF(f"{cursor.label}: {key} claims {count} strings, at most {MAX_STRINGS} are read")
    cursor.need(count * 8, key)
    parts = [head]
    take, keep = cursor.take, parts.append
    for _ in range(count):
        size = take(8, key)
        keep(size)
        keep(take(_U64.unpack(size)[0], key))
    return Entry(kind, b"".join(parts))


def _check_shape(label: str, name: str, shape: tuple[int, ...], ggml_type: int) -> None:
    if ggml_type not in QUANT_SIZES:
        raise BadGGUF(
            f"{label}: tensor {name} has the unknown type {ggml_type}; "
            "the file is damaged or newer than this version of meshnet"
        )
    count = 1
    for extent in shape:
        count *= extent
    if not 1 <= len(shape) <= 4 or min(shape) < 1 or count >= 1 << 48:
        raise BadGGUF(f"{label}: tensor {name} has the impossible shape {list(shape)}; the file is damaged")
    if shape[0] % QUANT_SIZES[ggml_type][0]:
        raise BadGGUF(
            f"{label}: rows of {shape[0]} in tensor {name} do not fit the blocks of {TYPE_NAMES[ggml_type]}; "
            "the file is damaged"
        )


def _read_part(path: Path, file_index: int) -> tuple[SourceFile, Metadata, list[Tensor]]:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            return _parse(stream, path, size, file_index)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(
    stream: BinaryIO, path: Path, size: int, file_index: int
) -> tuple[SourceFile, Metadata, list[Tensor]]:
    def read(offset: int, length: int) -> bytes:
        stream.seek(offset)
        return stream.read(length)

    label = str(path)
    if size < 24:
        magic = read(0, 4)
        if magic != b"GGUF"[: len(magic)] or not magic:
            raise NotGGUF(f"{label}: not a GGUF file (it starts with {magic!r}); give a .gguf model file")
    cursor = _Cursor(label, size, read)
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise NotGGUF(f"{label}: not a GGUF file (it starts with {magic!r}); give a .gguf model file")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise NotGGUF(f"{label}: a big-endian GGUF; convert it to little endian first (gguf-convert-endian)")
    if version not in (2, 3):
        raise NotGGUF(f"{label}: GGUF version {version}, only 2 and 3 are read; convert the model again")
    n_tensors = cursor.u64("the number of tensors")
    n_pairs = cursor.u64("the number of metadata entries")
    if n_tensors > MAX_TENSORS or n_pairs > MAX_PAIRS:
        raise BadGGUF(
            f"{label}: claims {n_tensors} tensors and {n_pairs} metadata entries "
            f"(at most {MAX_TENSORS} and {MAX_PAIRS} are read); the file is damaged, fetch it again"
        )
    entries: dict[str, Entry] = {}
    for _ in range(n_pairs):
        key = cursor.name("a metadata key")
        if key in entries:
            raise BadGGUF(f"{label}: the metadata key {key} stands twice; the file is damaged")
        entries[key] = _read_value(cursor, key, cursor.u32(key))
    metadata = Metadata(entries)
    alignment = (
        metadata.integer("general.alignment") if "general.alignment" in metadata else DEFAULT_ALIGNMENT
    )
    if alignment is None or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise BadGGUF(f"{label}: general.alignment is {alignment}, not a power of two; the file is damaged")
    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    for _ in range(n_tensors):
        name = cursor.name("a tensor's name")
        n_dims = cursor.u32(name)
        if not 1 <= n_dims <= 4:
            raise BadGGUF(f"{label}: tensor {name} has {n_dims} dimensions; the file is damaged")
        shape = tuple(cursor.u64(name) for _ in range(n_dims))
        ggml_type, offset = cursor.u32(name), cursor.u64(name)
        _check_shape(label, name, shape, ggml_type)
        if name in names:
            raise BadGGUF(f"{label}: tensor {name} stands twice; the file is damaged")
        if offset % alignment:
            raise BadGGUF(f"{label}: tensor {name} is not aligned to {alignment} bytes; the file is damaged")
        names.add(name)
        infos.append((name, shape, ggml_type, offset))
    data_start = (cursor.at + alignment - 1) // alignment * alignment
    tensors = []
    for name, shape, ggml_type, offset in infos:
        tensor = Tensor(
            name, shape, ggml_type, tensor_bytes(shape, ggml_type), file_index, data_start + offset
        )
        if tensor.offset + tensor.n_bytes > size:
            raise TruncatedGGUF(
                f"{label}: has {size} bytes, but tensor {name} ends at {tensor.offset + tensor.n_bytes}; "
                "the download was cut short, fetch the file again"
            )
        tensors.append(tensor)
    return SourceFile(path.name, size, path), metadata, tensors


def _open(path: Path) -> ModelFile:
    if path.is_dir():
        raise ModelNotFound(f"{path}: a folder, not a file; give the .gguf file in it")
    first_file, metadata, tensors = _read_part(path, 0)
    count = metadata.integer("split.count") or 1
    whole = ModelFile((first_file,), metadata, tuple(tensors))
    model = whole if count == 1 else _open_split(path, count)
    _check_model(str(path), model)
    return model


def _open_split(path: Path, count: int) -> ModelFile:
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
    files: list[SourceFile] = []
    tensors: list[Tensor] = []
    entries: dict[str, Entry] = {}
    for index, each in enumerate(paths):
        file, metadata, own = _read_part(each, index)
        if (metadata.integer("split.no"), metadata.integer("split.count")) != (index, count):
            raise MissingPart(
                f"{each}: is not part {index + 1} of {count} by its own metadata; fetch this part again"
            )
        entries = entries or metadata.entries()
        files.append(file)
        tensors.extend(own)
    claimed = Metadata(entries).integer("split.tensors.count")
    if claimed is not None and claimed != len(tensors):
        raise MissingPart(
            f"{path}: the parts hold {len(tensors)} tensors, {claimed} are announced; "
            "the parts belong to different models, fetch them again"
        )
    return ModelFile(
        tuple(files),
        Metadata({key: entry for key, entry in entries.items() if not key.startswith("split.")}),
        tuple(tensors),
    )


def _check_model(label: str, model: ModelFile) -> None:
    """A header can be well-formed and still not describe a model that anything here could use."""
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
