"""Fixtures that several folders share: one real demo per test session."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.mesh import Demo, Mesh, run_demo, run_mesh
from support.smollm2 import smollm2_path

from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

# Models and slices of the tests are kept between runs, but never in the user's own cache.
os.environ.setdefault("MESHNET_CACHE", str(Path(__file__).parents[1] / ".venv" / "test-cache"))

# Of tests/chaos. Here, so that the header shows it and all workers of a run have the same.
os.environ.setdefault("CHAOS_SEED", str(secrets.randbelow(1 << 32)))

settings.register_profile("default", deadline=None)
settings.register_profile("full", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header() -> str:
    return f"chaos seed: {os.environ['CHAOS_SEED']}"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """`meshnet demo --json` on a free port: SmolLM2, cut at 15, two node processes."""
    with run_demo(tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """An empty mesh: the test starts the tracker and the nodes."""
    with run_mesh(tmp_path) as running:
        yield running


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
