"""What a model is, as one hash: two machines with the same fingerprint hold the same weights.

fingerprint = sha256 over a label, the metadata (sorted by key, in their GGUF bytes) and, sorted by name, each
tensor's name, type, shape and sha256. The order of tensors, their alignment, and how they are split over
files do not enter, so that a split model and its merged form are one model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from meshnet.models.errors import HashMismatch, ModelError, TruncatedGGUF
from meshnet.models.files import write_atomically
from meshnet.models.gguf import ModelFile
from meshnet.models.metadata import encode_pair

CHUNK = 4 << 20
KEPT_RESULTS = 256
_LABEL = b"meshnet model fingerprint 1\n"

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """The model's hash in hex, and the sha256 in hex of each of its tensors by name."""

    value: str
    tensor_hashes: dict[str, str]


class _Stamp(msgspec.Struct, frozen=True):
    """What changes when a file does, without reading it."""

    path: str
    n_bytes: int
    mtime_ns: int
    inode: int


class _Kept(msgspec.Struct, frozen=True):
    stamps: list[_Stamp]
    value: str
    tensor_hashes: dict[str, str]


def combine(model: ModelFile, tensor_hashes: Mapping[str, str]) -> str:
    """The fingerprint of a model whose tensors have these hashes. KeyError if one is missing."""
    digest = hashlib.sha256(_LABEL)
    for key, entry in sorted(model.metadata.entries().items()):
        if not key.startswith(("split.", "meshnet.")) and key != "general.alignment":
            digest.update(encode_pair(key, entry))
    for tensor in sorted(model.tensors, key=lambda each: each.name):
        name = tensor.name.encode("utf-8", "surrogateescape")
        digest.update(struct.pack("<Q", len(name)) + name)
        digest.update(
            struct.pack(f"<II{len(tensor.shape)}Q", tensor.ggml_type, len(tensor.shape), *tensor.shape)
        )
        digest.update(bytes.fromhex(tensor_hashes[tensor.name]))
    return digest.hexdigest()


def hash_tensors(model: ModelFile, progress: Progress | None = None) -> dict[str, str]:
    """The sha256 in hex of every tensor's bytes, read once in file order."""
    total, done = sum(tensor.n_bytes for tensor in model.tensors), 0
    hashes: dict[str, str] = {}
    buffer = memoryview(bytearray(CHUNK))
    with ExitStack() as stack:
        streams = [stack.enter_context(_local(file.path).open("rb", buffering=0)) for file in model.files]
        for tensor in sorted(model.tensors, key=lambda each: (each.file_index, each.offset)):
            stream, left, digest = streams[tensor.file_index], tensor.n_bytes, hashlib.sha256()
            stream.seek(tensor.offset)
            while left:
                count = stream.readinto(buffer[: min(left, CHUNK)])
                if not count:
                    name = model.files[tensor.file_index].name
                    raise TruncatedGGUF(f"{name}: ended within {tensor.name}; fetch the file again")
                digest.update(buffer[:count])
                left -= count
                done += count
                if progress is not None:
                    progress(done, total)
            hashes[tensor.name] = digest.hexdigest()
    return hashes


def fingerprint(
    model: ModelFile, *, cache: Path | None = None, progress: Progress | None = None
) -> Fingerprint:
    """The model's fingerprint and tensor hashes, reading all of it unless `cache` (a folder) knows the files.

    Of a slice, the fingerprint of the model that it was cut from is `model.fingerprint`; its own has no
    meaning, and asking for it is a ModelError.
    """
    if model.shard_range is not None:
        raise ModelError(f"{model.name}: is a slice; a fingerprint belongs to a whole model")
    kept = None if cache is None else cache / f"{_cache_name(model)}.json"
    stamps = [_stamp(_local(file.path)) for file in model.files]
    if kept is not None and (known := _load(kept)) is not None and known.stamps == stamps:
        return Fingerprint(known.value, known.tensor_hashes)
    hashes = hash_tensors(model, progress)
    found = Fingerprint(combine(model, hashes), hashes)
    if kept is not None and stamps == [_stamp(_local(file.path)) for file in model.files]:
        write_atomically(kept, msgspec.json.encode(_Kept(stamps, found.value, found.tensor_hashes)))
        _forget_oldest(kept.parent)
    return found


def verify(model: ModelFile) -> None:
    """Raise HashMismatch unless the model's metadata and tensor hashes really give its fingerprint.

    So that who knows the fingerprint can take a manifest from anyone, and tensors by their hashes after it.
    """
    hashes = dict(model.tensor_hashes)
    missing = [tensor.name for tensor in model.tensors if tensor.name not in hashes]
    if missing or not model.fingerprint:
        what = f"the hash of {missing[0]}" if missing else "its fingerprint"
        raise HashMismatch(f"{model.name}: {what} is not known; ask for a manifest with all hashes")
    if combine(model, hashes) != model.fingerprint:
        raise HashMismatch(
            f"{model.name}: its description does not give the fingerprint {model.fingerprint[:16]}…; "
            "ask another machine for the manifest"
        )


def with_fingerprint(model: ModelFile, found: Fingerprint) -> ModelFile:
    """The same model, knowing its fingerprint and tensor hashes."""
    hashes = tuple(sorted(found.tensor_hashes.items()))
    return dataclasses.replace(model, fingerprint=found.value, tensor_hashes=hashes)


def with_known(model: ModelFile, cache: Path) -> ModelFile:
    """The same model, knowing its fingerprint if `cache` does; nothing is read."""
    known = _load(cache / f"{_cache_name(model)}.json")
    if known is None or known.stamps != [_stamp(_local(file.path)) for file in model.files]:
        return model
    return with_fingerprint(model, Fingerprint(known.value, known.tensor_hashes))


def _local(path: Path | None) -> Path:
    if path is None:
        raise ModelError("the model's file is not on this machine, so it cannot be hashed here")
    return path


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return _Stamp(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)


def _cache_name(model: ModelFile) -> str:
    return hashlib.sha256(str(_local(model.files[0].path).resolve()).encode()).hexdigest()[:32]


def _load(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None


def _forget_oldest(folder: Path) -> None:
    results = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in results[:-KEPT_RESULTS]:
        path.unlink(missing_ok=True)
