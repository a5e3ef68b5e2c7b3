"""A GBNF grammar over a vocabulary, through llama.cpp's grammar sampler.

llama.cpp ends the process when a grammar is fed a token that it does not allow, so nothing is accepted here
that was not asked about before.
"""

from __future__ import annotations

import ctypes as c

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import EngineError
from meshnet.engine.bindings import TokenData, TokenDataArray

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Grammar:
    """One session's state in a grammar. `close` frees it; the vocabulary's model must outlive it."""

    def __init__(self, api: c.CDLL, vocabulary: int, n_vocab: int, text: str) -> None:
        self._api = api
        self._n_vocab = n_vocab
        if "\0" in text:
            raise EngineError("the grammar contains a NUL character; remove it")
        self._sampler = api.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
        if not self._sampler:
            raise EngineError("the grammar cannot be parsed as GBNF with a rule named root; correct it")
        self._one = TokenData()
        self._one_array = TokenDataArray(c.addressof(self._one), 1, -1, False)

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        self._one.id, self._one.logit, self._one.p = token, 1.0, 0.0
        self._one_array.size, self._one_array.selected = 1, -1
        self._api.llama_sampler_apply(self._sampler, c.byref(self._one_array))
        return bool(self._one.logit > -1e30)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """For every token, whether it may come next, shape (n_vocab,). Takes milliseconds."""
        candidates = np.zeros(self._n_vocab, dtype=CANDIDATE)
        candidates["id"] = np.arange(self._n_vocab, dtype=np.int32)
        array = TokenDataArray(candidates.ctypes.data, self._n_vocab, -1, False)
        self._api.llama_sampler_apply(self._sampler, c.byref(array))
        mask = np.zeros(self._n_vocab, dtype=np.bool_)
        mask[candidates["id"]] = candidates["logit"] > -1e30
        return mask

    def accept(self, token: int) -> None:
        """Advance by a token that `allows` said yes to."""
        self._api.llama_sampler_accept(self._sampler, token)

    def reset(self) -> None:
        """Back to the start."""
        self._api.llama_sampler_reset(self._sampler)

    def close(self) -> None:
        if self._sampler:
            self._api.llama_sampler_free(self._sampler)
            self._sampler = None
