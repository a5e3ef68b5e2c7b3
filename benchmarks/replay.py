"""How fast a lost stage is rebuilt: per row, against prefill and decode of the same route."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from figures import ROOT, Spread, Table, parser

sys.path.insert(0, str(ROOT / "tests"))
from support.gates import gates
from support.mesh import run_mesh
from support.quad import Quad, ask

LAYERS = {"a": "0-14", "b1": "15-29", "b2": "15-29"}
AT = 250
"""Pieces of text after which the tail is killed: nearly all that is rebuilt was generated."""
ENDLESS = {"0": -100, "2": -100}
"""No end of text and no end of the turn."""
WORDS = "The keeper of the lighthouse counted the ships that passed by. "


def main() -> None:
    given = parser(__doc__).parse_args()
    rebuild, prefill, decode = [], [], []
    with tempfile.TemporaryDirectory() as folder, run_mesh(Path(folder)) as mesh, gates() as links:
        quad = Quad(mesh, links, LAYERS, ("--slots", "4", "--ctx", "640"))
        quad.start()
        for number in range(given.repeats):

            def strike(piece: int) -> None:
                if piece == AT:
                    quad.break_("b1", "kill")

            prompt = f"Number {number}: count to one thousand in words, without a pause."
            heard = ask(
                mesh, prompt, max_tokens=AT + 20, nodes=("a", "b1"), on_piece=strike, logit_bias=ENDLESS
            )
            call = quad.call(heard.call_id)
            if heard.error is not None or not call["reroutes"]:
                raise RuntimeError(f"no tail was lost: {heard.error}, {len(heard.times)} pieces")
            rows = call["prompt_tokens"] + AT
            pauses = [(b - a) * 1000 for a, b in zip(heard.times, heard.times[1:], strict=False)]
            rebuild.append(max(pauses) / rows)
            decode.append(statistics.median(pauses))
            quad.mend()
            begun = time.monotonic()
            long = ask(mesh, f"Number {number}. " + WORDS * 20, max_tokens=2, nodes=("a", "b1"))
            prefill.append((long.times[0] - begun) * 1000 / quad.call(long.call_id)["prompt_tokens"])
    table = Table("What a row costs", ["", "ms per row"])
    table.add(
        f"rebuilding a killed tail after {AT} generated tokens, the whole pause", Spread.of(rebuild).text()
    )
    table.add("prefill, to the first token, both stages", Spread.of(prefill).text())
    table.add("decode, one stream, both stages", Spread.of(decode).text())
    table.publish("replay", keep=given.keep)


if __name__ == "__main__":
    main()
