"""Memory per node, against the shard's bytes, its KV room, the replay buffer and 250 MB."""

from __future__ import annotations

import tempfile
from pathlib import Path

from figures import Table, parser
from stand import MODEL, Node, decode_rate, halves, memory_of, mesh, proposed_cut, two_cores

from meshnet.engine.memory import memory_need
from meshnet.models.store import Store
from meshnet.node.loader import DEFAULT_CTX, DEFAULT_SLOTS
from meshnet.node.ring import DEFAULT_BYTES

ROOM = 250_000_000


def megabytes(size: float) -> str:
    return f"{size / 1e6:.0f}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=8)
    chosen = options.parse_args()
    a, b = two_cores()
    model = Store().open(MODEL)
    layers = halves(proposed_cut(chosen.streams), model.n_layers)
    columns = ["node", "shard", "KV room", "replay buffer", "allowed", "resident", "of that not shared"]
    table = Table("Memory per node, MB", [*columns, "used / allowed"])
    meshes = (("two", layers, (a, b)), ("one", (f"0-{model.n_layers - 1}",), (a,)))
    for name, ranges, cores in meshes:
        nodes = [Node(held, core) for held, core in zip(ranges, cores, strict=True)]
        with tempfile.TemporaryDirectory() as folder, mesh(name, Path(folder) / name, nodes) as end:
            decode_rate(end, 32, chosen.streams)
            for index, held in enumerate(ranges):
                first, _, last = held.partition("-")
                need = memory_need(model, int(first), int(last), n_slots=DEFAULT_SLOTS, n_ctx=DEFAULT_CTX)
                allowed = need.weights + need.kv + DEFAULT_BYTES + ROOM
                used = memory_of(end.pids[f"node{index}"])
                table.add(
                    held,
                    megabytes(need.weights),
                    megabytes(need.kv),
                    megabytes(DEFAULT_BYTES),
                    megabytes(allowed),
                    megabytes(used["Rss"]),
                    megabytes(used["Anonymous"]),
                    f"{used['Rss'] / allowed:.2f}",
                )
    table.notes.append(
        f"after {chosen.streams} streams at once; {DEFAULT_SLOTS} slots of {DEFAULT_CTX} positions"
    )
    table.publish("memory", keep=chosen.keep)


if __name__ == "__main__":
    main()
