"""Text to tokens and back, by llama.cpp's own tokenizers, from the metadata of a GGUF."""

from __future__ import annotations

import codecs
import ctypes as c
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import EngineError
from meshnet.engine.grammar import Grammar
from meshnet.engine.library import last_messages, load_library

NO_VOCABULARY = 0
"""LLAMA_VOCAB_TYPE_NONE: a shard from the middle of a model."""
_FIRST_PIECE = 64
"""Bytes tried first for a token's text; a longer one is asked for again."""


class Tokenizer:
    """One model's vocabulary. Immutable, and may be used from several threads at once.

    Holds the vocabulary alone, no weights; a shard's file will do as long as it is a head's or a tail's.
    It is freed once nobody has the tokenizer any more.
    """

    def __init__(self, path: str | Path) -> None:
        library = load_library()
        self._api = library.api
        params = self._api.llama_model_default_params()
        params.vocab_only = True
        self._model: int | None = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise EngineError(f"{Path(path).name}: its vocabulary cannot be read: {last_messages()}")
        self._free = weakref.finalize(self, self._api.llama_model_free, self._model)
        self._free.atexit = False
        self.vocabulary: int = self._api.llama_model_get_vocab(self._model)
        """Address of llama.cpp's vocabulary."""
        self.n_vocab: int = self._api.llama_vocab_n_tokens(self.vocabulary)
        if self._api.llama_vocab_type(self.vocabulary) == NO_VOCABULARY:
            self.close()
            raise EngineError(f"{Path(path).name}: it has no vocabulary; take the head's or the tail's file")
        self.bos: int = self._api.llama_vocab_bos(self.vocabulary)
        self.eos: int = self._api.llama_vocab_eos(self.vocabulary)
        self.adds_bos: bool = bool(self._api.llama_vocab_get_add_bos(self.vocabulary))
        self.eog: frozenset[int] = frozenset(
            token for token in range(self.n_vocab) if self._api.llama_vocab_is_eog(self.vocabulary, token)
        )
        self._pieces: dict[int, bytes] = {}

    def encode(
        self, text: str, *, special: bool = True, add_bos: bool | None = None
    ) -> npt.NDArray[np.int32]:
        """Token ids of a text, int32, shape (n,).

        `special`: control tokens written out in the text become these tokens; False for text that users
        wrote. `add_bos`: None does what the model's metadata says, but never doubles one that the text
        brings itself.
        """
        data = text.encode("utf-8", "replace")
        wants = self.adds_bos if add_bos is None else add_bos
        room = len(data) + 8
        while True:
            tokens = np.empty(room, dtype=np.int32)
            # llama.cpp's own flag adds an end token as well where the metadata says so: not wanted here
            count: int = self._api.llama_tokenize(
                self.vocabulary, data, len(data), tokens.ctypes.data, room, False, special
            )
            if count >= 0:
                break
            if count == -(1 << 31):
                raise EngineError("the text is too long to be tokenised")
            room = -count
        tokens = tokens[:count]
        has_bos = count > 0 and int(tokens[0]) == self.bos
        if wants and self.bos >= 0 and not has_bos:
            tokens = np.concatenate([np.array([self.bos], dtype=np.int32), tokens])
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; of control tokens nothing, unless `special`."""
        if not 0 <= token < self.n_vocab:
            raise EngineError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        key = -1 - token if special else token
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._read_piece(token, special)
        return found

    def _read_piece(self, token: int, special: bool) -> bytes:
        size = _FIRST_PIECE
        while True:
            buffer = c.create_string_buffer(size)
            count: int = self._api.llama_token_to_piece(self.vocabulary, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def is_control(self, token: int) -> bool:
        return bool(self._api.llama_vocab_is_control(self.vocabulary, token))

    def decode(self, tokens: npt.NDArray[np.int32] | list[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(int(token), special=special) for token in tokens).decode(
            "utf-8", "replace"
        )

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """A decoder for one call's tokens as they come."""
        return StreamDecoder(self, special=special)

    def grammar(self, text: str) -> Grammar:
        """The start of a GBNF grammar over this vocabulary, which must outlive it. Raises EngineError."""
        return Grammar(self._api, self.vocabulary, text)

    def close(self) -> None:
        """Free the vocabulary; the tokenizer cannot be used afterwards."""
        self._free()
        self._model = None


class StreamDecoder:
    """Tokens to text, one at a time; holds back the first bytes of a character until the last is there.

    An answer that a limit ends inside a character ends before it: half a character is no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._tokenizer.piece(token, special=self._special))
