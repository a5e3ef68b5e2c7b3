"""One stream, greedy: two nodes against one with the whole model, and that against llama.cpp's own server."""

from __future__ import annotations

import tempfile
from pathlib import Path

from figures import Spread, Table, parser, ratios
from stand import Node, decode_rate, halves, interleaved, llama_server, mesh, proposed_cut, two_cores


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--threads", type=int, choices=(1, 2), help="only this many per process")
    chosen = options.parse_args()
    a, b = two_cores()
    layers = halves(proposed_cut(1))
    table = Table(
        "Single stream, decode tokens/s",
        ["threads", "two nodes", "one node", "llama.cpp's server", "two / one", "one / llama.cpp"],
    )
    for threads in (chosen.threads,) if chosen.threads else (1, 2):
        first, second = (a, b) if threads == 1 else (f"{a},{b}", f"{a},{b}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with interleaved(
                mesh(
                    "two", folder / "two", [Node(layers[0], first, threads), Node(layers[1], second, threads)]
                ),
                mesh("one", folder / "one", [Node("0-29", first, threads)]),
                llama_server(first, threads, 1),
            ) as ends:
                for end in ends:
                    decode_rate(end, 16)
                rows = [[decode_rate(end, chosen.tokens) for end in ends] for _ in range(chosen.repeats)]
        two, one, server = ([row[i] for row in rows] for i in range(3))
        table.add(
            f"{threads} per process",
            *(Spread.of(rates).text(1) for rates in (two, one, server)),
            ratios(two, one).text(),
            ratios(one, server).text(),
        )
    table.notes.append(
        f"cut: layers {layers[0]} and {layers[1]}; with one thread each node has a core of its own"
    )
    table.notes.append("wanted: two / one 0.90 with one thread, 0.85 with two; one / llama.cpp 0.95")
    table.publish("single_stream", keep=chosen.keep)


if __name__ == "__main__":
    main()
