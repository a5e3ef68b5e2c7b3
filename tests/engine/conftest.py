"""The real model, its tokenizer and a folder of shards, shared by the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("engine.conformance")


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random-models")
