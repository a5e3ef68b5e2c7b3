"""Reading headers: what a model is, split files, manifests, and files that are not what they should be."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_gguf import CHAT_TEMPLATE, N_CTX_TRAIN, write_random_model

from meshnet.models.errors import (
    BadGGUF,
    MissingPart,
    ModelError,
    ModelNotFound,
    NotGGUF,
    TruncatedGGUF,
)
from meshnet.models.gguf import ModelFile, model_info
from meshnet.models.header import parse_header
from meshnet.models.metadata import INT32, STRING, UINT32, Entry, array_entry, encode_pair, scalar_entry

RandomModel = Callable[..., Path]
PEAK_BYTES = 64 << 20


def header(
    *pairs: tuple[str, Entry], tensors: bytes = b"", n_tensors: int = 0, n_pairs: int | None = None
) -> bytes:
    """The bytes of a GGUF header with these metadata entries and ready-made tensor infos."""
    body = b"".join(encode_pair(key, entry) for key, entry in pairs)
    count = len(pairs) if n_pairs is None else n_pairs
    return struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, count) + body + tensors


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    label = name.encode()
    return struct.pack(
        f"<Q{len(label)}sI{len(shape)}QIQ", len(label), label, len(shape), *shape, kind, offset
    )


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def problem(data: bytes) -> str | None:
    """What reading these bytes as a header complains about; None if nothing."""
    try:
        metadata, _ = parse_header("fuzz", len(data), reader(data))
    except ModelError as error:
        return str(error)
    for key in metadata:
        assert metadata[key] is not None
    return None


def test_real_model(smollm2: ModelFile, smollm2_path: Path) -> None:
    assert (smollm2.arch, smollm2.n_layers, smollm2.n_embd, smollm2.n_vocab) == ("llama", 30, 576, 49152)
    assert (smollm2.n_ctx_train, smollm2.quantisation, smollm2.tied) == (8192, "Q4_1", True)
    assert smollm2.n_bytes == smollm2_path.stat().st_size
    assert "<|im_start|>" in (smollm2.chat_template or "")
    assert sum(smollm2.layer_bytes) + smollm2.output_bytes == sum(t.n_bytes for t in smollm2.tensors)
    assert smollm2.embedding_bytes == 30081024
    assert model_info(smollm2)["layers"] == 30


def test_agrees_with_the_gguf_package(smollm2: ModelFile, smollm2_path: Path) -> None:
    reader = gguf.GGUFReader(smollm2_path)
    for theirs, ours in zip(reader.tensors, smollm2.tensors, strict=True):
        assert ours.name == theirs.name
        assert ours.shape == tuple(int(extent) for extent in theirs.shape)
        assert (ours.ggml_type, ours.n_bytes) == (int(theirs.tensor_type), int(theirs.n_bytes))
        assert ours.offset == int(theirs.data_offset)
    for key in smollm2.metadata:
        field = reader.get_field(key)
        assert field is not None
        assert smollm2.metadata[key] == field.contents()


def test_random_model(random_models: RandomModel) -> None:
    model = ModelFile.open(random_models("qwen3moe"))
    assert (model.arch, model.n_layers, model.n_ctx_train) == ("qwen3moe", 8, N_CTX_TRAIN)
    assert model.chat_template == CHAT_TEMPLATE
    assert not model.tied
    assert model.output_bytes > model.by_name["output.weight"].n_bytes
    assert len(set(model.layer_bytes)) == 1


def test_prediction_blocks_are_no_layers(random_models: RandomModel) -> None:
    model = ModelFile.open(random_models("qwen35", prediction_layers=1))
    assert (model.n_blocks, model.n_layers, len(model.layer_bytes)) == (9, 8, 8)


def test_split_from_any_part(tmp_path: Path, random_models: RandomModel) -> None:
    first = write_random_model(tmp_path / "parts.gguf", "qwen2", split_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    whole = ModelFile.open(random_models("qwen2"))
    assert len(parts) == 5
    for part in parts:
        model = ModelFile.open(part)
        assert model.path == first
        assert model.name == "parts"
        assert sorted(t.name for t in model.tensors) == sorted(t.name for t in whole.tensors)
        assert dict(model.metadata) == dict(whole.metadata)
        assert {t.file_index for t in model.tensors} == set(range(5))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first = write_random_model(tmp_path / "parts.gguf", "qwen2", split_tensors=20)
    (tmp_path / "parts-00003-of-00005.gguf").unlink()
    with pytest.raises(MissingPart, match=r"1 of 5 parts are missing: parts-00003-of-00005\.gguf"):
        ModelFile.open(first)
    shutil.copy(tmp_path / "parts-00002-of-00005.gguf", tmp_path / "parts-00003-of-00005.gguf")
    with pytest.raises(MissingPart, match=r"parts-00003-of-00005\.gguf: is part 2 of 5 by its own metadata"):
        ModelFile.open(first)
    alone = tmp_path / "renamed.gguf"
    shutil.copy(first, alone)
    with pytest.raises(MissingPart, match="original names"):
        ModelFile.open(alone)


def test_parts_of_another_model(tmp_path: Path) -> None:
    first = write_random_model(tmp_path / "a.gguf", "qwen2", split_tensors=20)
    (tmp_path / "other").mkdir()
    write_random_model(tmp_path / "other" / "a.gguf", "qwen2", split_tensors=20, n_layers=7)
    others = sorted((tmp_path / "other").glob("*.gguf"))
    shutil.copy(others[-1], tmp_path / "a-00005-of-00005.gguf")
    with pytest.raises(MissingPart, match="belong to different models"):
        ModelFile.open(first)


def test_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "note.gguf"
    for content in (b"", b"GG", b"hello, this is no model at all, whatever its name says"):
        path.write_bytes(content)
        with pytest.raises((NotGGUF, TruncatedGGUF), match=r"note\.gguf"):
            ModelFile.open(path)
    path.write_bytes(b"hello")
    with pytest.raises(NotGGUF, match="not a GGUF file"):
        ModelFile.open(path)
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    with pytest.raises(NotGGUF, match="big-endian"):
        ModelFile.open(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(NotGGUF, match="version 1"):
        ModelFile.open(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        ModelFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match="a folder"):
        ModelFile.open(tmp_path)


def test_truncated(tmp_path: Path, random_models: RandomModel) -> None:
    data = random_models("qwen2").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[:-1000])
    with pytest.raises(TruncatedGGUF, match="fetch the file again"):
        ModelFile.open(path)
    path.write_bytes(data[:3000])
    with pytest.raises(TruncatedGGUF, match="in the middle of"):
        ModelFile.open(path)


def test_every_truncation_is_an_error(random_models: RandomModel) -> None:
    data = random_models("qwen2").read_bytes()
    for size in range(0, 12000, 37):
        with pytest.raises(ModelError):
            parse_header("cut", size, reader(data[:size]))


ARCH = ("general.architecture", scalar_entry(STRING, "llama"))
SIZES = (("llama.block_count", scalar_entry(UINT32, 1)), ("llama.embedding_length", scalar_entry(UINT32, 32)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header(n_tensors=1 << 40), "tensors"),
        (header(n_pairs=1 << 40), "metadata entries"),
        (header(n_pairs=1) + struct.pack("<Q", 1 << 60), "a metadata key of"),
        (header(n_pairs=1) + struct.pack("<Q1sIQ", 1, b"k", 8, 1 << 50), "in the middle of k"),
        (header(n_pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 60), "in the middle of k"),
        (header(n_pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 60), "claims"),
        (header(n_pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 21), "in the middle of k"),
        (header(n_pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), "array of the unknown type 9"),
        (header(n_pairs=1) + struct.pack("<Q1sI", 1, b"k", 77) + bytes(64), "unknown type 77"),
        (header(ARCH, ARCH), "stands twice"),
        (header(("general.alignment", scalar_entry(UINT32, 48))), "not a power of two"),
        (header(("general.alignment", scalar_entry(STRING, "x"))), "not a power of two"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (32,) * 5, 0, 0)), "5 dimensions"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (1 << 40, 1 << 40), 0, 0)), "impossible shape"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (0, 4), 0, 0)), "impossible shape"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (33,), 2, 0)), "do not fit the blocks of Q4_0"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (32,), 999, 0)), "unknown type 999"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (32,), 0, 1)), "not aligned"),
        (header(ARCH, n_tensors=1, tensors=tensor_info("t", (32,), 0, 1 << 62)), "was cut short"),
        (header(ARCH, n_tensors=2, tensors=2 * tensor_info("t", (8,), 0, 0)) + bytes(64), "stands twice"),
        (header(), r"names no general\.architecture"),
        (header(ARCH), "block_count is 0"),
        (header(ARCH, ("llama.block_count", scalar_entry(UINT32, 1 << 31))), "block_count is"),
        (header(ARCH, ("llama.block_count", scalar_entry(UINT32, 1))), "embedding_length is missing"),
        (header(ARCH, *SIZES), "no tensors for layer 0"),
        (
            header(ARCH, *SIZES, n_tensors=1, tensors=tensor_info("blk.7.x", (8,), 0, 0)) + bytes(96),
            "beyond the 1 blocks",
        ),
    ],
)
def test_hostile_headers(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=said):
            ModelFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole small model's bytes, its tensor data cut off by naming a tensor-free size in the tests."""
    return write_random_model(tmp_path_factory.mktemp("small") / "s.gguf", "qwen2", n_layers=1).read_bytes()


@given(data=st.data())
def test_damaged_headers_never_crash(small_file: bytes, data: st.DataObject) -> None:
    """Whatever bytes are changed, put in or left out, the answer is a model or a ModelError."""
    start = data.draw(st.integers(0, 12000))
    removed = data.draw(st.integers(0, 64))
    put = data.draw(
        st.binary(max_size=16)
        | st.sampled_from([b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 1 << 63), struct.pack("<Q", 1 << 31)])
    )
    damaged = small_file[:start] + put + small_file[start + removed :]
    end = data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))
    damaged = damaged[:end]
    assert (problem(damaged) or "fuzz: ").startswith("fuzz: ")


@given(st.binary(max_size=400))
def test_noise_after_the_magic_number(noise: bytes) -> None:
    content = struct.pack("<4sI", b"GGUF", 3) + noise
    assert (problem(content) or "fuzz: ").startswith("fuzz: ")


def test_manifest_round_trip(smollm2: ModelFile) -> None:
    data = smollm2.to_manifest(fingerprint="f" * 64, tensor_hashes={"output_norm.weight": "0" * 64})
    again = ModelFile.from_manifest(data)
    assert again.tensors == smollm2.tensors
    assert dict(again.metadata) == dict(smollm2.metadata)
    assert again.fingerprint == "f" * 64
    assert dict(again.tensor_hashes) == {"output_norm.weight": "0" * 64}
    assert (again.name, again.n_bytes, again.layer_bytes) == (
        smollm2.name,
        smollm2.n_bytes,
        smollm2.layer_bytes,
    )
    assert again.to_manifest() == data
    with pytest.raises(ModelError, match="not on this machine"):
        _ = again.path


def test_manifest_of_split_files(tmp_path: Path) -> None:
    model = ModelFile.open(write_random_model(tmp_path / "m.gguf", "qwen2", split_tensors=20))
    again = ModelFile.from_manifest(model.to_manifest())
    assert [file.name for file in again.files] == [file.name for file in model.files]
    assert again.tensors == model.tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2"),
        ({"files": [["m.gguf", 100]]}, "lies outside its file"),
        ({"tensors": [["blk.0.x", [32], 0, 9, 0, 0]]}, "wrong size"),
        ({"tensors": [["blk.0.x", [32], 0, 128, 5, 0]]}, "lies outside its file"),
        ({"tensors": [["blk.0.x", [1 << 62, 9], 0, 128, 0, 0]]}, "impossible shape"),
        (
            {"metadata": [["general.architecture", 8, struct.pack("<Q", 99) + b"llama"]]},
            "shorter than it says",
        ),
        ({"metadata": [["general.architecture", 4, bytes(9)]]}, "longer than it says"),
        ({"metadata": []}, "names no general.architecture"),
        ({"fingerprint": "../../../etc/passwd"}, "no sha256"),
        ({"hashes": {"a": "b"}}, "no sha256"),
        (
            {"metadata": [["general.alignment", 4, bytes(4)], ["general.architecture", 8, ARCH[1].raw]]},
            "general.alignment is 0",
        ),
    ],
)
def test_manifests_are_not_trusted(random_models: RandomModel, change: dict[str, object], said: str) -> None:
    manifest = msgspec.msgpack.decode(ModelFile.open(random_models("qwen2")).to_manifest())
    with pytest.raises(BadGGUF, match=said):
        ModelFile.from_manifest(msgspec.msgpack.encode({**manifest, **change}))


@given(st.binary(max_size=300))
def test_noise_is_no_manifest(noise: bytes) -> None:
    with pytest.raises(BadGGUF, match="model manifest"):
        ModelFile.from_manifest(noise)


def test_metadata_values() -> None:
    picked = array_entry(INT32, [5, 6, 7, 8]).pick([3, 0, 0])
    assert picked.decode() == [8, 5, 5]
    assert array_entry(STRING, ["a", "ü"]).decode() == ["a", "ü"]
    with pytest.raises(ValueError, match="only an array of numbers"):
        array_entry(STRING, ["a"]).pick([0])
    with pytest.raises(ValueError, match="only an array of numbers"):
        scalar_entry(UINT32, 1).pick([0])
