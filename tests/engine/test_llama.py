"""The llama.cpp engine with the real model: the conformance suite, and what only this engine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from engine.conformance import EngineConformance, reference_tokens
from support.pipeline import Tokens

from meshnet.engine.llama import LlamaEngine
from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

PROMPTS = (
    "<|im_start|>user\nWhy is the sky blue by day and red in the evening?<|im_end|>\n<|im_start|>assistant\n",
    "The three most common mistakes that beginners make when they learn to bake bread are",
    'def quicksort(items):\n    """Sort a list of numbers."""\n',
)
LONG = "In the year {} the harbour town had {} ships, and the keeper of the lighthouse wrote it all down. "


@dataclass
class LlamaHarness:
    """Loads pieces of SmolLM2, one thread each."""

    model: ModelFile
    store: Store
    prompts: list[Tokens]
    long_prompt: Tokens
    whole: LlamaEngine
    every: LlamaEngine
    reference: dict[int, list[int]]
    n_layers: int = 30

    def load(self, first: int, last: int) -> LlamaEngine:
        return load(self.model, self.store, first, last)


def load(
    model: ModelFile, store: Store, first: int, last: int, cuts: range = range(0), slots: int = 8
) -> LlamaEngine:
    return LlamaEngine.load(model, first, last, cuts=cuts, n_slots=slots, n_ctx=1024, threads=1, store=store)


QUICK = {1, 10, 15, 18, 29}
"""Borders of the quick suite; the others are in `make test-full`."""


def some(border: int) -> Any:
    return pytest.param(border, marks=() if border in QUICK else pytest.mark.full)


@pytest.fixture(scope="module")
def harness(smollm2: ModelFile, store: Store, tokenizer: Tokenizer) -> Iterator[LlamaHarness]:
    long = "".join(LONG.format(1700 + 7 * i, 3 * i * i % 41) for i in range(20))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    whole = load(smollm2, store, 0, 29)
    found = LlamaHarness(
        model=smollm2,
        store=store,
        prompts=prompts,
        long_prompt=tokenizer.encode(long),
        whole=whole,
        every=load(smollm2, store, 0, 29, range(1, 30), slots=4),
        reference=reference_tokens(whole, prompts),
    )
    yield found
    found.whole.unload()
    found.every.unload()


class TestLlamaEngine(EngineConformance):
    """SmolLM2 on llama.cpp."""

    @pytest.fixture(params=[some(border) for border in range(1, 30)])
    def border(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)
