"""The tokenizer, with the real vocabulary and the random models' byte-level one."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_gguf import random_model

from meshnet.engine.base import EngineError
from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

SAMPLES = (
    "Hello, world!",
    "  two  spaces\n\n\tand a tab",
    "Grüße, 日本語, 🎉👩‍👩‍👧 café",
    "a\0b",
    "\u202eabc",
    "",
)


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, special=False)
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text


@given(text=st.text(max_size=200))
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Cut anywhere: nothing is lost, and no piece ends inside a character."""
    stream = tokenizer.stream()
    tokens = tokenizer.encode(text, special=False)
    pieces = [stream.push(int(token)) for token in tokens]
    left = tokenizer.decode(tokens).removeprefix("".join(pieces))
    assert left in ("", "\ufffd")  # the bytes of a character that the tokens do not complete
    if all(unicodedata.category(character)[0] != "C" for character in text):  # it lacks a few rare bytes
        assert "".join(pieces) == text


def test_a_character_comes_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🎉", special=False)
    assert len(tokens) > 1
    stream = tokenizer.stream()
    assert [stream.push(int(token)) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.push(int(tokens[-1])) == "🎉"


def test_control_tokens_are_read_only_where_they_may_be(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    special = tokenizer.encode(text)
    assert special[0] == 1
    assert special[-1] == 2
    written = tokenizer.encode(text, special=False)
    assert not {0, 1, 2} & set(written.tolist())
    assert tokenizer.decode(written) == text
    assert tokenizer.decode(special) == "user\nhi"
    assert tokenizer.decode(special, special=True) == text
    assert tokenizer.is_control(2)
    assert not tokenizer.is_control(1000)


def test_what_the_vocabulary_says(tokenizer: Tokenizer, smollm2: ModelFile) -> None:
    assert tokenizer.n_vocab == smollm2.n_vocab == 49152
    assert tokenizer.eos == 2
    assert {0, 2} <= tokenizer.eog
    assert not tokenizer.adds_bos
    assert tokenizer.encode("a", add_bos=True)[0] == tokenizer.bos
    assert tokenizer.encode("<|im_start|>a", add_bos=True).tolist().count(tokenizer.bos) == 1
    assert tokenizer.piece(tokenizer.eos) == b""
    assert tokenizer.piece(tokenizer.eos, special=True) == b"<|im_end|>"
    for token in (-1, tokenizer.n_vocab):
        with pytest.raises(EngineError, match="outside the vocabulary"):
            tokenizer.piece(token)


def test_a_long_text(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * 20_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_heads_and_a_tails_shard_will_do_and_a_middle_is_refused(
    tokenizer: Tokenizer, smollm2: ModelFile, store: Store
) -> None:
    expected = tokenizer.encode("some text").tolist()
    for first, last in ((0, 1), (28, 29)):
        shard = Tokenizer(store.shard(smollm2, first, last))
        assert shard.encode("some text").tolist() == expected
        assert shard.eog == tokenizer.eog
        shard.close()
    with pytest.raises(EngineError, match="vocabulary"):
        Tokenizer(store.shard(smollm2, 10, 11))


def test_a_random_models_vocabulary(random_models: Path) -> None:
    tokenizer = Tokenizer(random_model(random_models, "qwen3"))
    for text in SAMPLES[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.close()


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not a model" * 10)
    with pytest.raises(EngineError, match=r"wrong\.gguf"):
        Tokenizer(wrong)
