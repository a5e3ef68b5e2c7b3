"""Models that this folder's tests share, each written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import support.smollm2
from support.random_gguf import random_model

from meshnet.models.gguf import ModelFile

RandomModel = Callable[..., Path]


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """`random_models(arch, **options)`: the path of a random-weight model."""
    folder = tmp_path_factory.mktemp("random-models")

    def make(arch: str, **options: object) -> Path:
        return random_model(folder, arch, **options)

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model."""
    return support.smollm2.smollm2_path()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> ModelFile:
    return ModelFile.open(smollm2_path)
