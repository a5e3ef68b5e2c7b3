"""`meshnet model check`: a model whole and cut, side by side, and where rebuilt sessions are exact.

The comparison runs everything in this process: the whole model, and an engine per piece with the hidden
states handed from one to the next, as nodes do. Tokens decide; logits are compared as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshnet.engine.base import EngineError, Hidden, Sampled, SamplingParams, Step, Tokens
from meshnet.engine.llama import LlamaEngine
from meshnet.engine.proof import Proof, prove
from meshnet.engine.replay import record_proof
from meshnet.engine.shards import ShardStore
from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

COUNT = 64
CONTEXT = 1024
CHUNK = 256
LONG = 540
"""Tokens of the long prompt: beyond the 512 cells where llama.cpp's kernels change."""
SLOTS = 8

TEXTS = (
    "Write a short letter to a friend about the first warm day of the year.",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Norway is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Es war einmal ein König, der hatte drei Töchter, und",
)
SENTENCE = "In the year {} the harbour had {} ships, and the keeper of the lighthouse counted them all. "


@dataclass(frozen=True)
class Part:
    """Where whole and cut part: the token at `position` of the session of prompt number `prompt`."""

    prompt: int
    position: int
    whole_token: int
    cut_token: int
    whole_text: str
    cut_text: str
    logit_gap: float | None
    """Of the whole model, between its own token and the cut one's; None if that is not among its best 20."""


@dataclass(frozen=True)
class CutResult:
    """What comparing whole and cut gave."""

    cuts: tuple[int, ...]
    prompts: tuple[int, ...]
    """Their lengths in tokens."""
    tokens: int
    """Compared in all."""
    parts: tuple[Part, ...]
    largest_difference: float
    """Between logprobs of whole and cut, over the twenty best of each token before they part."""

    @property
    def identical(self) -> bool:
        return not self.parts


def prompts_for(tokenizer: Tokenizer, longest: int = LONG) -> list[Tokens]:
    """Several prompts, the last of `longest` tokens; for vocabularies that make nothing of text, numbers."""
    found = [tokenizer.encode(text, add_bos=True) for text in TEXTS]
    long = "".join(SENTENCE.format(1700 + 3 * i, 7 * i * i % 53) for i in range(longest // 8))
    found.append(tokenizer.encode(long, add_bos=True)[:longest])
    return [prompt for prompt in found if len(prompt)]


def greedy(engines: Sequence[LlamaEngine], prompt: Tokens, count: int, slot: int = 0) -> Iterator[Sampled]:
    """Greedy tokens of a prompt run through engines in a row, with the twenty best logprobs of each."""
    sampling = SamplingParams(temperature=0.0, logprobs=20, prompt_tokens=len(prompt))
    for engine in engines:
        engine.open(slot, engine.info.first, engine.info.last, sampling)
    found = None
    for start in range(0, len(prompt), CHUNK):
        part = prompt[start : start + CHUNK]
        found = _through(engines, slot, part, start + len(part) == len(prompt))
    for index in range(count):
        assert found is not None
        yield found
        if index + 1 < count:
            found = _through(engines, slot, np.array([found.token], dtype=np.int32), True)
    for engine in engines:
        engine.close(slot)


def _through(engines: Sequence[LlamaEngine], slot: int, tokens: Tokens, sample: bool) -> Sampled | None:
    hidden: Hidden | None = None
    for engine in engines:
        given = tokens if engine.info.is_head else None
        last = engine is engines[-1]
        step = Step(slot, engine.position(slot), tokens=given, hidden=hidden, sample=int(sample and last))
        result = engine.run([step])[0]
        hidden = result.hidden
    return result.sampled[0] if result.sampled else None


def compare(
    whole: LlamaEngine,
    pieces: Sequence[LlamaEngine],
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    count: int = COUNT,
) -> CutResult:
    """Run prompts through both; each prompt until its tokens part. Raises EngineError."""
    parts: list[Part] = []
    largest, compared = 0.0, 0
    for number, prompt in enumerate(prompts):
        cut_tokens = greedy(pieces, prompt, count)
        for ours, theirs in zip(greedy([whole], prompt, count), cut_tokens, strict=True):
            compared += 1
            largest = max(largest, _difference(ours, theirs))
            if ours.token != theirs.token:
                parts.append(_part(number, ours, theirs, tokenizer))
                break
        for engine in (whole, *pieces):
            engine.close(0)
    return CutResult(
        cuts=tuple(engine.info.first for engine in pieces[1:]),
        prompts=tuple(len(prompt) for prompt in prompts),
        tokens=compared,
        parts=tuple(parts),
        largest_difference=largest,
    )


def _difference(ours: Sampled, theirs: Sampled) -> float:
    other = dict(theirs.top)
    gaps = [abs(value - other[token]) for token, value in ours.top if token in other]
    return max(gaps, default=float("inf"))


def _part(number: int, ours: Sampled, theirs: Sampled, tokenizer: Tokenizer) -> Part:
    best = dict(ours.top)
    gap = best[ours.token] - best[theirs.token] if theirs.token in best else None
    texts = [tokenizer.piece(t, special=True).decode("utf-8", "replace") for t in (ours.token, theirs.token)]
    return Part(number, ours.position, ours.token, theirs.token, texts[0], texts[1], gap)


@contextmanager
def loaded(
    model: ModelFile, ranges: Sequence[tuple[int, int]], store: ShardStore, slots: int, context: int
) -> Iterator[list[LlamaEngine]]:
    """An engine per range of layers. Raises EngineError."""
    engines: list[LlamaEngine] = []
    try:
        for first, last in ranges:
            engines.append(LlamaEngine.load(model, first, last, n_slots=slots, n_ctx=context, store=store))
        yield engines
    finally:
        for engine in engines:
            engine.unload()


def run_check(
    path: str | Path, cuts: Sequence[int], *, replay: bool = False, json_output: bool = False
) -> int:
    """The command: prints what it found. 0: identical (and, with `replay`, exact); 1: not; 2: it did not run.

    Without cuts, the middle layer is one. A replay proof is kept in the cache folder, where engines find it.
    """
    try:
        report = _check(Path(path), cuts, replay)
    except (EngineError, ModelError) as error:
        sys.stderr.write(f"meshnet model check: {error}\n")
        return 2
    sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n" if json_output else report.as_text())
    return 0 if report.good else 1


@dataclass(frozen=True)
class _Report:
    model: ModelFile
    engine: str
    cut: CutResult
    proof: Proof | None
    kept_in: Path | None

    @property
    def good(self) -> bool:
        return self.cut.identical and (self.proof is None or self.proof.rows > 0)

    def as_json(self) -> dict[str, Any]:
        proof = None
        if self.proof is not None:
            proof = {**asdict(self.proof), "kept_in": str(self.kept_in)}
        return {
            "model": self.model.name,
            "arch": self.model.arch,
            "quantisation": self.model.quantisation,
            "layers": self.model.n_layers,
            "engine": self.engine,
            "identical": self.cut.identical,
            **asdict(self.cut),
            "replay": proof,
        }

    def as_text(self) -> str:
        model, cut = self.model, self.cut
        lines = [
            f"{model.name}: {model.arch}, {model.quantisation}, {model.n_layers} layers; {self.engine}",
            f"cut at {', '.join(map(str, cut.cuts))}: "
            + ("identical" if cut.identical else "NOT identical")
            + f" ({len(cut.prompts)} prompts, the longest of {max(cut.prompts)} tokens; {cut.tokens} tokens "
            f"compared; logprobs differ by {cut.largest_difference:.3g} at most)",
        ]
        for part in cut.parts:
            gap = "more than the best 20" if part.logit_gap is None else f"{part.logit_gap:.4f}"
            lines.append(
                f"  prompt {part.prompt + 1}, position {part.position}: whole {part.whole_token} "
                f"{part.whole_text!r}, cut {part.cut_token} {part.cut_text!r}, logit gap {gap}"
            )
        if self.proof is not None:
            lines.append(self.proof.as_text())
            lines.append(f"kept in {self.kept_in}")
        return "\n".join(lines) + "\n"


def _check(path: Path, cuts: Sequence[int], replay: bool) -> _Report:
    store = Store()
    model = store.identified(ModelFile.open(path))
    borders = sorted(set(cuts)) or [model.n_layers // 2]
    if borders[0] < 1 or borders[-1] >= model.n_layers:
        raise EngineError(
            f"{model.name} has layers 0-{model.n_layers - 1}: cuts lie at 1-{model.n_layers - 1}, "
            f"not at {', '.join(map(str, cuts))}"
        )
    ends = [border - 1 for border in borders] + [model.n_layers - 1]
    ranges = list(zip([0, *borders], ends, strict=True))
    context = min(CONTEXT, model.n_ctx_train or CONTEXT)
    tokenizer = Tokenizer(model.path)
    proof, kept_in = None, None
    try:
        prompts = prompts_for(tokenizer, min(LONG, context - COUNT))
        with loaded(model, [(0, model.n_layers - 1)], store, SLOTS if replay else 1, context) as whole:
            engine = whole[0]
            with loaded(model, ranges, store, 1, context) as pieces:
                cut = compare(engine, pieces, tokenizer, prompts)
            if replay:
                proof = prove(engine, prompts)
                info = engine.info
                kept_in = record_proof(info.arch, model.quantisation, info.numerics_class, proof.rows)
            numerics = engine.info.numerics_class
    finally:
        tokenizer.close()
        store.close()
    return _Report(model, numerics, cut, proof, kept_in)
