"""From raw logits to a token.

The order of work on a row: logit bias, penalties (over generated tokens only), temperature, top-k, top-p,
min-p, one draw. A draw is a hash of (seed, choice, position) turned into [0, 1) and looked up in the
cumulative distribution of what was kept, in a stable order, so it depends on nothing that came before: a
session rebuilt elsewhere from its tokens goes on with the same draws.

A grammar is asked about the drawn token first; only when it refuses is the distribution masked and a second,
independent draw made, which gives the same distribution as masking first (rejection sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import EngineError, GrammarError, Sampled, SamplingParams, Weight
from meshnet.engine.grammar import Grammar

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
MAX_LOGPROBS = 20
BLOCK = 256
LIKELIEST = (256, 4096)
"""How many of the likeliest tokens a grammar is asked about before it is asked about all."""
NEGLIGIBLE = 1e-3
NEVER = -1e30
"""Stands for the logit of a token that cannot be drawn."""

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, choice: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone."""
    state = 0
    for word in (seed, choice, position, stream):
        state = _mix((state + 0x9E3779B97F4A7C15 + (word & _MASK)) & _MASK)
    return (state >> 11) * 2.0**-53


def check_params(params: SamplingParams, n_vocab: int) -> None:
    """Raises EngineError naming the field that is out of range."""
    checks = (
        ("temperature", 0.0 <= params.temperature <= 100.0),
        ("top_p", 0.0 <= params.top_p <= 1.0),
        ("top_k", params.top_k >= 0),
        ("min_p", 0.0 <= params.min_p <= 1.0),
        ("presence_penalty", math.isfinite(params.presence_penalty)),
        ("frequency_penalty", math.isfinite(params.frequency_penalty)),
        ("repeat_penalty", math.isfinite(params.repeat_penalty) and params.repeat_penalty > 0.0),
        ("logprobs", -1 <= params.logprobs <= MAX_LOGPROBS),
        ("prompt_tokens", params.prompt_tokens >= 0),
        ("choice", params.choice >= 0),
    )
    for name, good in checks:
        if not good:
            raise EngineError(f"sampling: {name} is {getattr(params, name)}, which is out of its range")
    for token in params.check:
        if not 0 <= token < n_vocab:
            raise EngineError(f"sampling: check names token {token} of a vocabulary of {n_vocab}")
    for token, bias in params.logit_bias:
        if not 0 <= token < n_vocab:
            raise EngineError(f"sampling: logit_bias names token {token} of a vocabulary of {n_vocab}")
        if math.isnan(bias) or bias == math.inf:
            raise EngineError(f"sampling: logit_bias of token {token} is {bias}, which is out of its range")


def log_sum_exp(logits: Logits) -> float:
    """The logarithm of the raw distribution's normaliser: a token's logprob is its logit minus this."""
    best = float(logits.max())
    weights = logits - np.float32(best)
    np.exp(weights, out=weights)
    return best + math.log(float(weights.sum(dtype=np.float64)))


def _above(weights: Weights, enough: Callable[[Weights], bool]) -> Weights:
    """The largest weights, unordered, as many as `enough` asks for and often more, at the least all."""
    for floor in (1e-2, 1e-4, 1e-8):
        found = weights[weights >= np.float32(floor)]
        if enough(found):
            return found
    return weights


def _largest(weights: Weights, count: int, least: np.float32) -> npt.NDArray[np.intp]:
    """Indices, rising, of the `count` largest weights, the smallest being `least`; of ties the first."""
    index = np.flatnonzero(weights >= least)
    surplus = len(index) - count
    if surplus > 0:
        ties = np.flatnonzero(weights[index] == least)
        index = np.delete(index, ties[len(ties) - surplus :])
    return index


def _top_p(weights: Weights, top_p: float) -> npt.NDArray[np.intp]:
    """Indices, rising, of the fewest largest weights that together reach `top_p` of the sum.

    Sorts only what lies above a floor, if that is enough: a few hundred of many thousands.
    """
    goal = top_p * float(weights.sum(dtype=np.float64))
    falling = np.sort(_above(weights, lambda found: float(found.sum(dtype=np.float64)) > goal))[::-1]
    sums = np.cumsum(falling, dtype=np.float64)
    count = min(int(np.searchsorted(sums, goal)) + 1, len(falling))
    return _largest(weights, count, falling[count - 1])


def keep(weights: Weights, params: SamplingParams) -> npt.NDArray[np.intp] | None:
    """What top-k, top-p and min-p leave of unnormalised weights (largest 1.0): rising indices; None: all."""
    size = len(weights)
    index: npt.NDArray[np.intp] | None = None
    kept = weights
    if 0 < params.top_k < size:
        upper = _above(weights, lambda found: len(found) >= params.top_k)
        least = np.partition(upper, len(upper) - params.top_k)[len(upper) - params.top_k]
        index = _largest(weights, params.top_k, least)
        kept = weights[index]
    if params.top_p < 1.0:
        found = _top_p(kept, params.top_p)
        index = found if index is None else index[found]
        kept = weights[index]
    if params.min_p > 0.0:
        found = np.flatnonzero(kept >= np.float32(params.min_p))
        index = found if index is None else index[found]
    return index


def _passes(sums: npt.NDArray[np.float64], target: float) -> int:
    """The first index whose cumulative sum passes the target; never one that adds nothing."""
    return min(int(np.searchsorted(sums, target, side="right")), int(np.searchsorted(sums, sums[-1])))


def _look_up(weights: Weights, fraction: float) -> int:
    """Where the cumulative sum of the weights passes `fraction` of the total: by blocks, then inside one."""
    blocks = max(len(weights) // BLOCK, 1)
    by_block = np.empty(blocks, dtype=np.float64)
    whole = (blocks - 1) * BLOCK
    by_block[:-1] = weights[:whole].reshape(blocks - 1, BLOCK).sum(axis=1)
    by_block[-1] = weights[whole:].sum()
    sums = np.cumsum(by_block)
    target = fraction * float(sums[-1])
    block = _passes(sums, target)
    start = block * BLOCK
    inside = np.cumsum(
        weights[start:] if block == blocks - 1 else weights[start : start + BLOCK], dtype=np.float64
    )
    before = float(sums[block - 1]) if block else 0.0
    return start + _passes(inside, (target - before) * float(inside[-1]) / float(by_block[block]))


def draw(logits: Logits, params: SamplingParams, position: int, stream: int = 0) -> int:
    """One token of adjusted logits, shape (n_vocab,); -inf is never drawn unless all are."""
    best = int(logits.argmax())
    if params.temperature == 0.0:
        return best
    weights = logits - logits[best]
    weights *= np.float32(1.0 / max(params.temperature, 1e-6))
    np.exp(weights, out=weights)
    index = keep(weights, params)
    fraction = uniform(params.seed, params.choice, position, stream)
    if index is None:
        return _look_up(weights, fraction)
    return int(index[_look_up(weights[index], fraction)])


def _kept(logits: Logits, params: SamplingParams, token: int) -> bool:
    """Whether the token is one of those that may be drawn."""
    weights = logits - logits.max()
    weights *= np.float32(1.0 / max(params.temperature, 1e-6))
    np.exp(weights, out=weights)
    index = keep(weights, params)
    return bool(weights[token] > 0.0) if index is None else bool((index == token).any())


class SlotSampler:
    """One slot's sampler. Knows the tokens that were generated, by position.

    `eog` are the vocabulary's end-of-generation tokens; `grammar` makes the state of a grammar's text.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        eog: frozenset[int],
        make_grammar: Callable[[str], Grammar],
    ) -> None:
        check_params(params, n_vocab)
        self.params = params
        self._n_vocab = n_vocab
        self._eog = eog
        self._generated: list[int] = []
        self._counts: dict[int, int] = {}
        self._grammar = make_grammar(params.grammar) if params.grammar else None
        self._grammar_at = 0
        self._penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repeat_penalty != 1.0
        )
        self._bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)

    @property
    def end(self) -> int:
        """The position after the last token known."""
        return self.params.prompt_tokens + len(self._generated)

    def observe(self, tokens: Sequence[int] | npt.NDArray[np.int32], position: int) -> None:
        """These tokens stand at `position`..; what was known from there on is forgotten.

        Tokens below `prompt_tokens` do not count. Raises EngineError for a gap, a token outside the
        vocabulary, or one that the grammar does not allow.
        """
        start = max(position, self.params.prompt_tokens)
        fresh = [int(token) for token in tokens[start - position :]]
        if not fresh:
            return
        if start > self.end:
            if not (self._penalised or self._grammar):
                return  # nothing hangs on tokens that came before
            raise EngineError(f"the sampler knows tokens up to position {self.end}, not up to {start}")
        self._cut(start)
        for token in fresh:
            if not 0 <= token < self._n_vocab:
                raise EngineError(f"token {token} is outside the vocabulary of {self._n_vocab}")
            self._append(token)
        self._advance_grammar()

    def agrees(self, tokens: npt.NDArray[np.int32], position: int) -> bool:
        """Whether the tokens at `position`.. are what is known already."""
        start = max(position, self.params.prompt_tokens)
        at = start - self.params.prompt_tokens
        fresh = tokens[start - position :]
        known = self._generated[at : at + len(fresh)]
        return len(known) == len(fresh) and all(a == int(b) for a, b in zip(known, fresh, strict=True))

    def truncate(self, position: int) -> None:
        """Forget the tokens at positions after `position`: the one that stands there is yet to be run."""
        self._cut(position + 1)

    def sample(self, logits: Logits, position: int) -> Sampled:
        """The token for `position` from a raw row, shape (n_vocab,); it counts as generated from then on.

        Raises EngineError where the row is not finite or earlier tokens are not known, GrammarError where the
        grammar allows no token at all.
        """
        if position > self.end and (self._penalised or self._grammar):
            raise EngineError(
                f"the sampler lacks the tokens at positions {self.end}..{position - 1}; replay them first"
            )
        if position >= self.params.prompt_tokens:
            self._cut(position)
        best = int(logits.argmax())
        if not math.isfinite(float(logits[best])):
            raise EngineError("the logits are not finite; the hidden state or the weights are damaged")
        params = self.params
        adjusted = logits if self._plain else self._adjust(logits)
        token = best if self._plain and params.greedy else draw(adjusted, params, position)
        end = token in self._eog
        if self._grammar is not None:
            token, end = self._constrain(adjusted, token, position)
        given = position - params.prompt_tokens
        if 0 <= given < len(params.check):
            weight = self._weigh(adjusted, params.check[given], token)
            if self.end == position:
                self._append(params.check[given])
            return Sampled(position, token, end=end, weight=weight)
        if self.end == position:
            self._append(token)
        if params.logprobs < 0:
            return Sampled(position, token, end=end)
        normaliser = log_sum_exp(logits)
        top: tuple[tuple[int, float], ...] = ()
        if params.logprobs:
            count = min(params.logprobs, len(logits))
            edge = np.partition(logits, len(logits) - count)[len(logits) - count]
            near = np.flatnonzero(logits >= edge)
            order = near[np.argsort(-logits[near], kind="stable")][:count]
            top = tuple((int(i), float(logits[i]) - normaliser) for i in order)
        return Sampled(position, token, float(logits[token]) - normaliser, top, end)

    def _weigh(self, adjusted: Logits, given: int, drawn: int) -> Weight:
        """What stands for and against `given` where `drawn` was drawn; both are yet to be appended."""
        params, grammar = self.params, self._grammar
        best = float(adjusted[drawn] if params.greedy else adjusted.max())
        if grammar is not None and not grammar.allows(given):
            # No grammar goes on behind such a token; the check fails here anyway.
            grammar.close()
            self._grammar = None
            return Weight(NEVER, best, kept=False)
        kept = params.greedy or _kept(adjusted, params, given)
        if not kept and grammar is not None:
            masked = self._mask(adjusted, grammar)
            kept = masked is not None and _kept(masked, params, given)
        return Weight(max(float(adjusted[given]), NEVER), best, kept)

    def fork(self, make_grammar: Callable[[str], Grammar]) -> SlotSampler:
        """A copy that goes its own way."""
        copy = SlotSampler(self.params, self._n_vocab, self._eog, make_grammar)
        for token in self._generated:
            copy._append(token)
        copy._advance_grammar()
        return copy

    def close(self) -> None:
        if self._grammar is not None:
            self._grammar.close()

    @property
    def _plain(self) -> bool:
        return not len(self._bias) and not (self._penalised and self._counts)

    def _append(self, token: int) -> None:
        self._generated.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1

    def _cut(self, position: int) -> None:
        keep_count = max(position - self.params.prompt_tokens, 0)
        for token in self._generated[keep_count:]:
            left = self._counts[token] - 1
            if left:
                self._counts[token] = left
            else:
                del self._counts[token]
        del self._generated[keep_count:]
        if self._grammar is not None and self._grammar_at > keep_count:
            self._grammar.reset()
            self._grammar_at = 0

    def _adjust(self, logits: Logits) -> Logits:
        row = logits.copy()
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if self._penalised and self._counts:
            params = self.params
            ids = np.fromiter(self._counts.keys(), dtype=np.intp, count=len(self._counts))
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            values = row[ids]
            if params.repeat_penalty != 1.0:
                penalty = np.float32(params.repeat_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            values = values - counts * np.float32(params.frequency_penalty)
            row[ids] = values - np.float32(params.presence_penalty)
        return row

    def _advance_grammar(self) -> None:
        grammar = self._grammar
        if grammar is None:
            return
        for offset in range(self._grammar_at, len(self._generated)):
            token = self._generated[offset]
            if token in self._eog:
                break
            if not grammar.allows(token):
                raise EngineError(
                    f"token {token} at position {self.params.prompt_tokens + offset} is not one that the "
                    "grammar allows there; it belongs to another call"
                )
            grammar.accept(token)
            self._grammar_at = offset + 1

    def _constrain(self, adjusted: Logits, token: int, position: int) -> tuple[int, bool]:
        grammar = self._grammar
        assert grammar is not None
        self._advance_grammar()
        if self._grammar_at < len(self._generated):  # an end token was generated before
            return self._generated[-1], True
        if not grammar.allows(token):
            masked = self._mask(adjusted, grammar)
            if masked is None:
                raise GrammarError(
                    f"the grammar allows none of the vocabulary's tokens at position {position}: what was "
                    "generated so far cannot be completed; change the schema"
                )
            token = draw(masked, self.params, position, 1)
        return token, token in self._eog

    def _mask(self, logits: Logits, grammar: Grammar) -> Logits | None:
        """The logits with -inf for what the grammar refuses; None if it refuses everything.

        Asks about the likeliest tokens first and stops when all others together weigh less than a thousandth
        of those allowed: they count as refused then.
        """
        weights = logits - logits.max()
        if self.params.temperature > 0.0:
            weights *= np.float32(1.0 / max(self.params.temperature, 1e-6))
        np.exp(weights, out=weights)
        total = float(weights.sum(dtype=np.float64))
        for count in (*LIKELIEST, len(logits)):
            if count < len(logits):
                least = np.partition(logits, len(logits) - count)[len(logits) - count]
                ids = _largest(logits, count, least)
            else:
                ids = np.arange(len(logits))
            kept = ids[grammar.allowed(ids.astype(np.int32)) & (logits[ids] > -np.inf)]
            rest = total - float(weights[ids].sum(dtype=np.float64))
            enough = self.params.greedy or rest <= NEGLIGIBLE * float(weights[kept].sum(dtype=np.float64))
            if count >= len(logits) or (len(kept) and enough):
                break
        if not len(kept):
            return None
        masked = np.full_like(logits, -np.inf)
        masked[kept] = logits[kept]
        return masked
