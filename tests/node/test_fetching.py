"""Bringing weights: what comes over the line, and how often."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from support.smollm2 import smollm2_path

from meshnet.models.gguf import ModelFile
from meshnet.models.origins import Origin, spans_of
from meshnet.models.slice import plan_slice
from meshnet.models.sources import LocalSource
from meshnet.models.store import Store
from meshnet.node.fetching import Fetcher, WeightSources


class Counted(LocalSource):
    """The model's file, which counts the bytes that it gives."""

    passed = 0

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        async for chunk in super().read(file_index, offset, length):
            self.passed += len(chunk)
            yield chunk


async def test_what_segments_share_comes_once(tmp_path: Path) -> None:
    """The first and the last segment of a model with a tied matrix both hold it."""
    store = Store(tmp_path)
    model = store.identified(ModelFile.open(smollm2_path()))
    assert model.tied
    source = Counted(model)
    borders = [(0, 14), (15, 29)]
    slices = await Fetcher(store).bring(
        model, borders, WeightSources(), [Origin("line", source)], lambda _: None
    )
    plans = [plan_slice(model, first, last) for first, last in borders]
    once = sum(last - first for _, first, last in spans_of([p for plan in plans for p in plan.pieces]))
    assert source.passed == once < sum(plan.copy_bytes for plan in plans)
    for plan, path in slices:
        assert ModelFile.open(path).shard_range == (plan.first, plan.last)
