"""The Engine protocol: what a node asks of whatever computes its layers.

An engine holds one shard `[first, last]` (inclusive) of one model and runs batches of steps of many
sessions. It is synchronous and is only ever called from one thread; batching, queues, sockets and
clocks belong to the node. Every engine must pass `tests/engine/conformance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Hidden = npt.NDArray[np.float32]
"""Hidden states, float32, shape (n_rows, n_embd), C-contiguous."""

Tokens = npt.NDArray[np.int32]
"""Token ids, int32, shape (n_rows,)."""


class EngineError(Exception):
    """The engine refused or failed; the message says why in one sentence."""

    code = "engine"
    """Under which other nodes hear of it."""


class GrammarError(EngineError):
    """The request's grammar is at fault: every engine with this vocabulary would say the same."""

    code = "grammar"


@dataclass(frozen=True)
class SamplingParams:
    """How a tail turns logits into a token. A draw depends on (seed, choice, position) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    """Index of the choice within the call (n > 1)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    """GBNF; empty: none. Advanced by the sampled tokens only."""
    logprobs: int = -1
    """-1: none wanted; 0..20: the chosen token's logprob and that many alternatives."""
    prompt_tokens: int = 0
    """Length of the prompt: positions below it never count for penalties or the grammar."""
    check: tuple[int, ...] = ()
    """The tokens of an answer that is checked: they stand behind the prompt whatever is drawn there, and each
    `Sampled` has the `weight` of the one at its position."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Weight:
    """What a sampler makes of a token that it did not draw: logits with bias, penalties and grammar."""

    logit: float
    """-1e30 where the grammar does not allow the token."""
    max_logit: float
    """The greatest that may be drawn."""
    kept: bool
    """Whether the token is in the set from which one is drawn (top_k, top_p, min_p, grammar)."""


@dataclass(frozen=True)
class Sampled:
    """One sampled token: the token that stands at `position` of the session."""

    position: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """Alternatives (token, logprob), most likely first; logprobs are of the raw distribution."""
    end: bool = False
    """An end-of-generation token of the vocabulary, or the grammar has nothing more to allow."""
    weight: Weight | None = None
    """Of the token of `SamplingParams.check` that stands here; `token` is still the one drawn."""


@dataclass(frozen=True)
class Step:
    """One forward of n rows of one slot at positions position..position+n-1.

    Exactly one of `tokens` (a shard that starts at layer 0) and `hidden` (any other) is given.
    `sample` is the number of last rows to sample after (tail only): 0 for prefill chunks that are
    not the last, 1 for the last chunk and for decode, n for a verifying step.
    """

    slot: int
    position: int
    tokens: Tokens | None = None
    hidden: Hidden | None = None
    sample: int = 0
    drafts: tuple[int, ...] = ()
    """The tokens of the rows behind the first sampled one, sample - 1 of them, in a verifying step: no row is
    sampled behind one whose sample is another token than the next draft, or ends the text."""

    @property
    def rows(self) -> int:
        rows = self.tokens if self.tokens is not None else self.hidden
        return 0 if rows is None else int(rows.shape[0])


@dataclass(frozen=True)
class StepResult:
    """`hidden` (n_rows, n_embd) from a stage that is not the tail; `sampled` from the tail."""

    slot: int
    position: int
    hidden: Hidden | None = None
    sampled: tuple[Sampled, ...] = ()


@dataclass(frozen=True)
class EngineInfo:
    """What is loaded, fixed for the engine's life."""

    model: str
    fingerprint: str
    arch: str
    first: int
    last: int
    model_layers: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    """Positions a single slot can hold."""
    n_slots: int
    max_rows: int
    """Rows that one call of `run` takes at most."""
    entry_layers: tuple[int, ...]
    """Layers at which a session may start here; exits: every layer of the shard."""
    recurrent: bool
    """Rollback reaches checkpoints only."""
    numerics_class: str
    """Equal strings mean equal bits (engine version, backend, CPU features, flash attention, threads
    where they matter)."""
    replay_rows: int
    """Generated tokens may be replayed in chunks of up to this many rows and still be bit-exact
    (63 where proven; 1: as they were first batched)."""
    hardware: str
    memory_bytes: int
    """Weights + KV room + compute buffers, as the engine reports them."""

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.model_layers - 1


@dataclass(frozen=True)
class SelfTest:
    """Measured when a shard is loaded: milliseconds of compute, no links."""

    decode_ms_per_layer: float
    prefill_ms_per_token_layer: float
    embed_ms: float
    """Per decode step, beyond the layers, when the shard holds the head."""
    output_ms: float
    """Per decode step, beyond the layers (norm, output matrix, sampling), when it holds the tail."""
    batch_ms: dict[int, float] = field(default_factory=dict)
    """Milliseconds of one decode call over the whole shard by number of sessions in it."""


class Engine(Protocol):
    """A loaded shard. Slots are 0..n_slots-1; each is one sequence's state."""

    @property
    def info(self) -> EngineInfo: ...

    def open(self, slot: int, entry: int, exit: int, sampling: SamplingParams | None = None) -> None:
        """Clears the slot and sets the layers it runs: entry..exit, both inclusive.

        `entry` must be one of `entry_layers`, `exit` any layer from entry to the shard's last;
        `sampling` is required when exit is the model's last layer. Raises EngineError otherwise.
        """

    def run(self, steps: Sequence[Step]) -> list[StepResult]:
        """Runs all steps as one batch where the engine can; results in the order of the steps.

        All steps of one call have the same entry and exit. Positions must follow the slot's own
        (EngineError names slot, position and what was expected). At most `max_rows` rows in all.
        Raises EngineError; the slots of a failed call are as they were before it, or closed.
        """

    def replay_tokens(self, slot: int, tokens: Tokens, position: int) -> None:
        """Tells the slot's sampler which tokens stand at position.. (prompt or generated), so that
        penalties, grammar and draws go on as if it had sampled them. No compute. Tail only."""

    def position(self, slot: int) -> int:
        """Number of positions the slot holds."""

    def rollback(self, slot: int, position: int) -> int:
        """Forgets positions from `position` on; returns the position reached (lower on recurrent
        models: the caller computes again from there)."""

    def fork(self, source: int, target: int, sampling: SamplingParams | None = None) -> None:
        """Makes `target` an independent copy of `source` (same entry, exit and position)."""

    def resample(self, slot: int, sampling: SamplingParams) -> None:
        """Gives a slot that ends at the model's last layer a fresh sampler, and keeps its state: the next
        call goes on from a prefix that an earlier one left."""

    def close(self, slot: int) -> None:
        """Frees the slot. Closing a closed slot is no error."""

    def self_test(self) -> SelfTest: ...

    def unload(self) -> None:
        """Frees everything. The engine cannot be used afterwards."""

    def describe(self) -> dict[str, Any]:
        """For diagnosis: segments, buffers, threads."""
