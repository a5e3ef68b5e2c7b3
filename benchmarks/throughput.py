"""Several streams on the same two cores: two nodes, one node, and llama.cpp's own server."""

from __future__ import annotations

import tempfile
from pathlib import Path

from figures import Spread, Table, parser, ratios
from stand import Node, decode_rate, halves, interleaved, llama_server, mesh, proposed_cut, two_cores


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=48, help="per stream")
    options.add_argument("--streams", type=int, nargs="+", default=[8, 16])
    chosen = options.parse_args()
    a, b = two_cores()
    table = Table(
        "Several streams on two cores, decode tokens/s in all",
        ["streams", "two nodes", "one node", "llama.cpp's server", "two / one", "one / llama.cpp"],
    )
    for streams in chosen.streams:
        head, tail = halves(proposed_cut(streams))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with interleaved(
                mesh("two", folder / "two", [Node(head, a), Node(tail, b)]),
                mesh("one", folder / "one", [Node("0-29", f"{a},{b}", 2)]),
                llama_server(f"{a},{b}", 2, streams),
            ) as ends:
                for end in ends:
                    decode_rate(end, 12, streams)
                rows = [
                    [decode_rate(end, chosen.tokens, streams) for end in ends] for _ in range(chosen.repeats)
                ]
        two, one, server = ([row[i] for row in rows] for i in range(3))
        table.add(
            streams,
            *(Spread.of(rates).text(1) for rates in (two, one, server)),
            ratios(two, one).text(),
            ratios(one, server).text(),
        )
        table.notes.append(f"{streams} streams: two nodes cut into {head} and {tail}, one thread each")
    table.notes.append("wanted: both ratios 0.95")
    table.publish("throughput", keep=chosen.keep)


if __name__ == "__main__":
    main()
