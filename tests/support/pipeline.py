"""Engines in a row, driven like the nodes of a route: tokens into the first, samples out of the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import Engine, Hidden, Sampled, SamplingParams, Step

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Stage:
    """One engine's run of layers, both inclusive."""

    engine: Engine
    start: int
    end: int


class Pipeline:
    """Sessions over stages; a session has the same slot on all of them."""

    def __init__(self, *stages: tuple[Engine, int, int]) -> None:
        self.stages = [Stage(*stage) for stage in stages]

    @classmethod
    def of(cls, *engines: Engine) -> Pipeline:
        """Stages that run all layers of their engines."""
        return cls(*((engine, engine.info.first, engine.info.last) for engine in engines))

    def open(self, slot: int, sampling: SamplingParams) -> None:
        for stage in self.stages:
            stage.engine.open(slot, stage.start, stage.end, sampling)

    def close(self, *slots: int) -> None:
        for stage in self.stages:
            for slot in slots:
                stage.engine.close(slot)

    def position(self, slot: int) -> int:
        return self.stages[0].engine.position(slot)

    def run(
        self, batch: Mapping[int, Sequence[int] | Tokens], sample: int = 1
    ) -> dict[int, tuple[Sampled, ...]]:
        """One step of each session of the batch, as one call per stage."""
        tokens = {slot: np.asarray(rows, dtype=np.int32) for slot, rows in batch.items()}
        hidden: dict[int, Hidden | None] = dict.fromkeys(batch)
        sampled: dict[int, tuple[Sampled, ...]] = {}
        for index, stage in enumerate(self.stages):
            last = index == len(self.stages) - 1
            steps = [
                Step(
                    slot,
                    stage.engine.position(slot),
                    tokens=None if stage.start else rows,
                    hidden=hidden[slot],
                    sample=sample if last else 0,
                )
                for slot, rows in tokens.items()
            ]
            results = stage.engine.run(steps)
            hidden = {result.slot: result.hidden for result in results}
            sampled = {result.slot: result.sampled for result in results}
        return sampled

    def prefill(self, slot: int, prompt: Tokens, chunk: int = 256) -> Sampled:
        """The prompt in chunks, alone; returns the first token."""
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            done = start + len(part) == len(prompt)
            found = self.run({slot: part}, sample=int(done))
        return found[slot][0]

    def generate(
        self, prompts: Mapping[int, Tokens], count: int, sampling: SamplingParams, chunk: int = 256
    ) -> dict[int, list[int]]:
        """`count` tokens for each slot's prompt, all slots in one batch; the slots stay open."""
        found: dict[int, list[int]] = {}
        for slot, prompt in prompts.items():
            self.open(slot, with_prompt(sampling, prompt))
            found[slot] = [self.prefill(slot, prompt, chunk).token]
        self.go_on(found, count - 1)
        return found

    def go_on(self, found: dict[int, list[int]], count: int) -> None:
        """`count` more tokens for each slot, appended."""
        for _ in range(count):
            for slot, sampled in self.run({slot: [tokens[-1]] for slot, tokens in found.items()}).items():
                found[slot].append(sampled[0].token)

    def rebuild(
        self, slot: int, prompt: Tokens, generated: Sequence[int], sampling: SamplingParams, rows: int
    ) -> None:
        """The session as it was before its last token was run: the prompt, then the tokens in chunks."""
        self.open(slot, with_prompt(sampling, prompt))
        for start in range(0, len(prompt), 256):
            self.run({slot: prompt[start : start + 256]}, sample=0)
        for start in range(0, len(generated) - 1, rows):
            self.run({slot: generated[start : min(start + rows, len(generated) - 1)]}, sample=0)
        self.stages[-1].engine.replay_tokens(slot, np.asarray(generated, dtype=np.int32), len(prompt))


def with_prompt(sampling: SamplingParams, prompt: Tokens) -> SamplingParams:
    """The same parameters for a prompt of this length."""
    fields = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    return SamplingParams(**{**fields, "prompt_tokens": len(prompt)})
