"""In which pieces a head feeds tokens to its route. Pure.

Pieces matter: only a prompt that is computed with the borders of its first run gives the same bits again,
and generated tokens only in pieces that are proven to (`EngineInfo.replay_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.node.prefixes import Spans


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions start..end-1 in one step. `prefill`: runs alone, at any size. `replay`: not the first time.
    `sample`: the token after the last row is wanted. `drafts`: guesses for the positions from `end` on, which
    run with it and are checked."""

    start: int
    end: int
    prefill: bool
    replay: bool
    sample: bool
    drafts: tuple[int, ...] = ()


def prompt_spans(reused: Spans, start: int, end: int, chunk: int, *, last_alone: bool) -> Spans:
    """How a prompt of `end` tokens is cut: what was reused as it was run, then from `start` on at the
    multiples of `chunk`. With `last_alone` the last token is a span of its own, from which choices fork."""
    spans = [span for span in reused if span[0] < start]
    stop = end - 1 if last_alone else end
    at = start
    while at < stop:
        border = min((at // chunk + 1) * chunk, stop)
        spans.append((at, border))
        at = border
    if last_alone and start < end:
        spans.append((end - 1, end))
    return tuple(spans)


def generated_spans(start: int, end: int, rows: int) -> Spans:
    """Pieces in which generated tokens at start..end-1 may be computed again."""
    return tuple((at, min(at + rows, end)) for at in range(start, end, rows))


def plan(spans: Spans, prompt: int, known: int, position: int, rows: int, *, replay: bool) -> list[Piece]:
    """The pieces that take a session from `position` to all `known` tokens, of which `prompt` are the
    prompt's. `rows`: of generated tokens per piece. `replay`: this is not the first run."""
    pieces: list[Piece] = []
    for start, end in (*spans, *generated_spans(prompt, known, rows)):
        first = max(start, position)
        if first < end:
            single = end - first == 1 and known - first == 1
            pieces.append(Piece(first, end, not single, replay and not single, end == known))
    return pieces
