"""The real model's vocabulary, with llama.cpp's own grammar sampler over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.smollm2 import smollm2_path

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
    tokenizer = Tokenizer(smollm2_path())
    yield Judge(tokenizer)
    tokenizer.close()
