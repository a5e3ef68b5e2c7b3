"""Proves how a session can be rebuilt so that it goes on with the same bits.

Sessions are generated in company, eight in a batch, and the digest of every row of logits is kept. Then each
is rebuilt by itself: its prompt with the chunk borders of the first run, its tokens in chunks of up to 63
rows, and what follows is compared row by row. A single bit that differs counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshnet.engine.base import EngineError, SamplingParams, Step, Tokens
from meshnet.engine.numerics import EXACT_ROWS

if TYPE_CHECKING:
    from meshnet.engine.llama import LlamaEngine

CHUNK = 256
CONTINUATIONS = 60
TOKENS = 64
COMPARED = 6
"""Rows compared after each rebuilt point; a difference shows in the first already."""


@dataclass(frozen=True)
class Proof:
    """`rows`: chunks in which generated tokens may be replayed; 1: one at a time; 0: not even so, because the
    engine gives other bits in company than alone."""

    rows: int
    continuations: int
    compared_rows: int
    differences: int
    """Rows that differed when replayed in chunks of 63."""

    def as_text(self) -> str:
        what = f"{self.continuations} continuations, {self.compared_rows} rows of logits compared"
        if self.rows == EXACT_ROWS:
            return f"replay: exact to the bit in chunks of up to {EXACT_ROWS} rows ({what})"
        if self.rows == 1:
            return (
                f"replay: exact one token at a time only; in chunks {self.differences} rows differ ({what})"
            )
        return f"replay: NOT exact: sessions in company get other bits than alone ({what})"


@dataclass(frozen=True)
class _Session:
    prompt: Tokens
    tokens: Tokens
    digests: tuple[bytes, ...]
    """Of the logits after the prompt, then after each token."""


def prove(
    engine: LlamaEngine,
    prompts: Sequence[Tokens],
    *,
    continuations: int = CONTINUATIONS,
    tokens: int = TOKENS,
) -> Proof:
    """Try 63 rows per chunk, then 1. The engine must hold the whole model, with all slots free."""
    if not (engine.info.is_head and engine.info.is_tail):
        raise EngineError("only an engine with the whole model can prove how its sessions are rebuilt")
    sessions: list[_Session] = []
    company = min(engine.info.n_slots, 8)
    for round_ in range(math.ceil(continuations / company)):
        wanted = min(company, continuations - len(sessions))
        batch = [prompts[(len(sessions) + i) % len(prompts)] for i in range(wanted)]
        sessions += _generate(engine, batch, tokens, round_)
    compared, differences = _compare(engine, sessions, EXACT_ROWS)
    if differences == 0:
        return Proof(EXACT_ROWS, len(sessions), compared, 0)
    few = sessions[:company]
    alone = _compare(engine, few, 1)[1]
    return Proof(0 if alone else 1, len(sessions), compared, differences)


def _digest(engine: LlamaEngine, row: int) -> bytes:
    return hashlib.blake2b(engine.logits(row).tobytes(), digest_size=16).digest()


def _prefill(engine: LlamaEngine, slot: int, prompt: Tokens, params: SamplingParams) -> int:
    last = engine.info.last
    engine.open(slot, 0, last, params)
    for start in range(0, len(prompt), CHUNK):
        part = prompt[start : start + CHUNK]
        done = start + len(part) == len(prompt)
        result = engine.run([Step(slot, start, tokens=part, sample=int(done))])[0]
    return result.sampled[0].token


def _generate(engine: LlamaEngine, prompts: Sequence[Tokens], count: int, seed: int) -> list[_Session]:
    """Sampled continuations, all in one batch; differing, where a prompt comes twice."""
    found: list[list[int]] = []
    digests: list[list[bytes]] = []
    for slot, prompt in enumerate(prompts):
        params = SamplingParams(seed=seed, choice=slot, prompt_tokens=len(prompt))
        found.append([_prefill(engine, slot, prompt, params)])
        digests.append([_digest(engine, (len(prompt) - 1) % CHUNK)])
    for _ in range(count):
        steps = [
            Step(slot, engine.position(slot), tokens=np.array(tokens[-1:], dtype=np.int32), sample=1)
            for slot, tokens in enumerate(found)
        ]
        for slot, result in enumerate(engine.run(steps)):
            digests[slot].append(_digest(engine, slot))
            found[slot].append(result.sampled[0].token)
    for slot in range(len(prompts)):
        engine.close(slot)
    return [
        _Session(prompt, np.array(tokens[:-1], dtype=np.int32), tuple(rows))
        for prompt, tokens, rows in zip(prompts, found, digests, strict=True)
    ]


def _compare(engine: LlamaEngine, sessions: Sequence[_Session], rows: int) -> tuple[int, int]:
    """Rebuild every session at a point of its own and go on; (rows compared, rows that differed)."""
    compared = differences = 0
    for number, session in enumerate(sessions):
        count = len(session.tokens)
        point = count - COMPARED - number % max(1, count // 2)
        if rows > 1:
            point = max(point, min(2, count))
        params = SamplingParams(prompt_tokens=len(session.prompt))
        _prefill(engine, 0, session.prompt, params)
        pairs = [(_digest(engine, (len(session.prompt) - 1) % CHUNK), session.digests[0])]
        at = 0
        while at < count and len(pairs) <= COMPARED + 1:
            size = min(rows, point - at) if at < point else 1
            part = session.tokens[at : at + size]
            engine.run([Step(0, len(session.prompt) + at, tokens=part, sample=1)])
            at += size
            if at >= point or rows == 1:
                pairs.append((_digest(engine, size - 1), session.digests[at]))
        engine.close(0)
        compared += len(pairs)
        differences += sum(ours != theirs for ours, theirs in pairs)
    return compared, differences
