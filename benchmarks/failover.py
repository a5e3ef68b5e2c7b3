"""What a user sees of a node's death: the longest pause between two pieces of text, for kills and wedges."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from figures import ROOT, Table, parser

sys.path.insert(0, str(ROOT / "tests"))
from support.gates import gates
from support.mesh import run_mesh
from support.quad import Heard, Quad, ask

LAYERS = {"a1": "0-14", "a2": "0-14", "b1": "15-29", "b2": "15-29"}
WORDS = "The keeper of the lighthouse counted the ships that passed by. "
TASK = "Now count from one to one hundred, in words."
CONTEXTS = (64, 256, 460)
"""Prompt tokens, about; with the answer at most 512."""
TOKENS = 40
HOWS = ("nothing", "kill", "cut", "stop", "swallow")


def gap_ms(quad: Quad, victim: str, how: str, number: int, context: int) -> float | None:
    """The longest pause of one streamed answer, its end included, during which `how` happens to a node of its
    route; None where that moved no call."""
    heard, before = Heard(), 0

    def strike(piece: int) -> None:
        nonlocal before
        if piece == 8 and how != "nothing":
            before = quad.call(heard.call_id)["reroutes"]
            quad.break_(victim, how)

    prompt = f"Number {number} of {how} at {victim}. " + WORDS * (context // 13) + TASK
    ask(quad.mesh, prompt, max_tokens=TOKENS, nodes=("a1", "b1"), on_piece=strike, heard=heard)
    heard.times.append(time.monotonic())  # the end counts as a piece
    if heard.error is not None:
        raise RuntimeError(f"a call was lost: {heard.error}")
    moved = quad.call(heard.call_id)["reroutes"] > before
    quad.mend()
    return heard.longest_gap * 1000 if moved or how == "nothing" else None


def quantile(values: list[float], part: float) -> float:
    """By rank: of few values the upper ones count."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--how", nargs="+", choices=HOWS, default=HOWS, help="only these")
    given = options.parse_args()
    table = Table(
        "The gap that a user sees", ["what happens", "to the", "n", "without", "p50 ms", "p95 ms", "most ms"]
    )
    with tempfile.TemporaryDirectory() as folder, run_mesh(Path(folder)) as mesh, gates() as links:
        quad = Quad(mesh, links, LAYERS, ("--slots", "4", "--ctx", "640"))
        quad.start()
        gaps: dict[tuple[str, str], list[float]] = {}
        without: Counter[tuple[str, str]] = Counter()
        for number in range(given.repeats):
            for context in CONTEXTS:
                for victim in ("b1", "a1"):
                    for how in given.how:
                        gap = gap_ms(quad, victim, how, number, context)
                        values = gaps.setdefault((how, victim), [])
                        if gap is None:
                            without[how, victim] += 1
                        else:
                            values.append(gap)
                        sys.stderr.write(f"{how} {victim} context {context}: {gap} ms\n")
    for (how, victim), values in gaps.items():
        where = "head" if victim == "a1" else "tail"
        shown = [f"{quantile(values, part):.0f}" if values else "-" for part in (0.5, 0.95, 1.0)]
        table.add(how, where, len(values), without[how, victim], *shown)
    table.notes.append(f"contexts of about {CONTEXTS} prompt tokens, {TOKENS} tokens of answer, in turns")
    table.notes.append("without: samples left out, for the call stayed on its route")
    table.publish("failover", keep=given.keep)


if __name__ == "__main__":
    main()
