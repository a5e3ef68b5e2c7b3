"""Fingerprints: the same model gives the same one however it is laid out, another model another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.random_gguf import write_random_model

from meshnet.models.errors import ModelError
from meshnet.models.fingerprint import combine, fingerprint, with_fingerprint
from meshnet.models.gguf import ModelFile
from meshnet.models.slice import plan_slice, write_slice

RandomModel = Callable[..., Path]


def test_split_and_merged_are_one_model(tmp_path: Path, random_models: RandomModel) -> None:
    whole = ModelFile.open(random_models("qwen2"))
    parts = ModelFile.open(write_random_model(tmp_path / "m.gguf", "qwen2", split_tensors=20))
    assert fingerprint(whole) == fingerprint(parts)


def test_tensor_hashes(random_models: RandomModel) -> None:
    model = ModelFile.open(random_models("qwen2"))
    data = model.path.read_bytes()
    found = fingerprint(model)
    assert set(found.tensor_hashes) == set(model.by_name)
    for tensor in model.tensors:
        own = data[tensor.offset : tensor.offset + tensor.n_bytes]
        assert found.tensor_hashes[tensor.name] == hashlib.sha256(own).hexdigest()
    assert combine(model, found.tensor_hashes) == found.value


def test_one_bit_or_one_value_makes_another_model(tmp_path: Path, random_models: RandomModel) -> None:
    source = random_models("qwen2")
    before = fingerprint(ModelFile.open(source)).value
    data = bytearray(source.read_bytes())
    data[-5] ^= 1
    changed = tmp_path / "m.gguf"
    changed.write_bytes(data)
    values = {before, fingerprint(ModelFile.open(changed)).value}
    values.add(fingerprint(ModelFile.open(random_models("qwen2", seed=1))).value)
    values.add(fingerprint(ModelFile.open(random_models("qwen2", extra={"rope.scaling.factor": 2.0}))).value)
    assert len(values) == 4


def test_cache_follows_the_file(tmp_path: Path, random_models: RandomModel) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(random_models("qwen2").read_bytes())
    cache, reads = tmp_path / "cache", []

    def run() -> str:
        reads.append(0)

        def count(done: int, total: int) -> None:
            reads[-1] = done

        return fingerprint(ModelFile.open(path), cache=cache, progress=count).value

    first = run()
    assert run() == first
    assert reads[0] == sum(t.n_bytes for t in ModelFile.open(path).tensors)
    assert reads[1] == 0
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert run() != first
    for kept in cache.glob("*.json"):
        kept.write_text("{ damaged")
    run()
    assert reads[2] == reads[3] == reads[0]


def test_of_a_slice(tmp_path: Path, random_models: RandomModel) -> None:
    model = ModelFile.open(random_models("qwen2"))
    model = with_fingerprint(model, fingerprint(model))
    shard = ModelFile.open(write_slice(plan_slice(model, 0, 3), tmp_path / "s.gguf"))
    assert shard.fingerprint == model.fingerprint
    with pytest.raises(ModelError, match="belongs to a whole model"):
        fingerprint(shard)


def test_a_manifest_alone_cannot_be_hashed(random_models: RandomModel) -> None:
    model = ModelFile.from_manifest(ModelFile.open(random_models("qwen2")).to_manifest())
    with pytest.raises(ModelError, match="not on this machine"):
        fingerprint(model)
