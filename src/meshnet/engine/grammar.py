"""A GBNF grammar over a vocabulary, through llama.cpp's grammar sampler.

llama.cpp ends the process when a grammar is fed a token that it does not allow, so nothing is accepted here
that was not asked about before.
"""

from __future__ import annotations

import ctypes as c
import time

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import GrammarError
from meshnet.engine.bindings import TokenData, TokenDataArray

MAX_TEXT = 1 << 18
BUDGET_S = 1.0
CHUNK = 1024
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Grammar:
    """One session's state in a grammar. `close` frees it; the vocabulary's model must outlive it."""

    def __init__(self, api: c.CDLL, vocabulary: int, text: str) -> None:
        self._api = api
        if len(text) > MAX_TEXT:
            raise GrammarError(f"the grammar has {len(text)} characters, more than {MAX_TEXT}; simplify it")
        if "\0" in text:
            raise GrammarError("the grammar contains a NUL character; remove it")
        self._sampler = api.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
        if not self._sampler:
            raise GrammarError("the grammar cannot be parsed as GBNF with a rule named root; correct it")
        self._one = TokenData()
        self._one_array = TokenDataArray(c.addressof(self._one), 1, -1, False)

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        self._one.id, self._one.logit, self._one.p = token, 1.0, 0.0
        self._one_array.size, self._one_array.selected = 1, -1
        self._api.llama_sampler_apply(self._sampler, c.byref(self._one_array))
        return bool(self._one.logit > -1e30)

    def allowed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """For each of the tokens, whether it may come next. Thousands of them take milliseconds.

        Raises GrammarError where the grammar is so ambiguous that it takes more than BUDGET_S.
        """
        mask = np.zeros(len(tokens), dtype=np.bool_)
        started = time.monotonic()
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            candidates = np.zeros(len(part), dtype=CANDIDATE)
            candidates["id"] = part
            array = TokenDataArray(candidates.ctypes.data, len(part), -1, False)
            self._api.llama_sampler_apply(self._sampler, c.byref(array))
            mask[start : start + CHUNK] = candidates["logit"] > -1e30
            if time.monotonic() - started > BUDGET_S:
                raise GrammarError(f"the grammar takes more than {BUDGET_S:g} s for one token; simplify it")
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
