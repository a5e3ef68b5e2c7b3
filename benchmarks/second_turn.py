"""The second turn of a conversation: time to its first token, against the same request sent cold."""

from __future__ import annotations

import tempfile
from pathlib import Path

from figures import Spread, Table, parser, ratios
from stand import (
    Endpoint,
    Node,
    ask,
    content_of,
    halves,
    interleaved,
    mesh,
    proposed_cut,
    request_of,
    two_cores,
    words,
)

HISTORY_WORDS, NEW_WORDS = 780, 14


def turn(end: Endpoint, seed: int, *, warm: bool) -> float:
    """Milliseconds to the first token of a second turn; with `warm`, the first turn was asked before."""
    messages = [{"role": "user", "content": words(HISTORY_WORDS, seed)}]
    said = "The fox, the owl and the bear went to the sea."
    if warm:
        (first,) = ask(end, [request_of(end, messages, 16)])
        said = content_of(first)
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": words(NEW_WORDS, seed + 1)},
    ]
    (second,) = ask(end, [request_of(end, messages, 4)])
    return second.first_ms


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    chosen = options.parse_args()
    a, b = two_cores()
    head, tail = halves(proposed_cut(1))
    table = Table("Second turn, ms to the first token", ["", "after the first turn", "cold", "ratio"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with interleaved(
            mesh("two nodes", folder / "two", [Node(head, a), Node(tail, b)]),
            mesh("one node", folder / "one", [Node("0-29", a)]),
        ) as ends:
            for end in ends:
                turn(end, 1, warm=True)
            for end in ends:
                pairs = [
                    (turn(end, 100 + 4 * i, warm=True), turn(end, 102 + 4 * i, warm=False))
                    for i in range(chosen.repeats)
                ]
                warm, cold = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                table.add(
                    end.name, Spread.of(warm).text(0), Spread.of(cold).text(0), ratios(warm, cold).text()
                )
    table.notes.append("about 1,000 tokens of history and 20 new ones; wanted: 0.15")
    table.publish("second_turn", keep=chosen.keep)


if __name__ == "__main__":
    main()
