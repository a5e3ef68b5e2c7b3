"""The real model and what it says when it is whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

pytest.register_assert_rewrite("node.bench")

if TYPE_CHECKING:
    from node.bench import Bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(smollm2: ModelFile, store: Store) -> AsyncIterator[Bench]:
    """An empty mesh for the module's nodes."""
    from node.bench import Bench

    found = Bench(smollm2, store)
    yield found
    await found.close()
