"""What a second node brings: two on a core each against one on one core, at the proposed cut."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from figures import Spread, Table, parser, ratios
from stand import (
    Endpoint,
    Node,
    ask,
    cpu_seconds,
    decode_rate,
    halves,
    interleaved,
    mesh,
    proposed_cut,
    request_of,
    two_cores,
    words,
)

PROMPT_WORDS = 800


def shared_cpu(end: Endpoint) -> float:
    """CPU seconds of tracker and client so far: they take them from the nodes' cores."""
    return cpu_seconds(end.pids["tracker"]) + time.process_time()


def prefill_rate(end: Endpoint, seed: int) -> float:
    """Prompt tokens per second until the first token, of a prompt of about 1,024 tokens never seen before."""
    request = request_of(end, [{"role": "user", "content": words(PROMPT_WORDS, seed)}], 4)
    (answer,) = ask(end, [request])
    return answer.prompt / (answer.first - answer.begun)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options.add_argument("--tokens", type=int, default=48, help="per stream")
    options.add_argument("--streams", type=int, nargs="+", default=[8, 16])
    options.add_argument("--cut", type=int, help="instead of the proposed one")
    chosen = options.parse_args()
    a, b = two_cores()
    cut = chosen.cut or proposed_cut(max(chosen.streams))
    head, tail = halves(cut)
    table = Table(
        "Capacity, tokens/s in all",
        ["load", "two nodes", "one node", "two / one", "tracker and client, % of a core: two", "one"],
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with interleaved(
            mesh("two", folder / "two", [Node(head, a), Node(tail, b)]),
            mesh("one", folder / "one", [Node("0-29", a)]),
        ) as ends:
            for end in ends:
                prefill_rate(end, 0)
            loads = [(f"{n} streams", n) for n in chosen.streams] + [("prompt of 1,024 tokens", 0)]
            for label, streams in loads:
                rates: list[list[float]] = [[], []]
                shares: list[list[float]] = [[], []]
                for turn in range(chosen.repeats + bool(streams)):
                    for index, end in enumerate(ends):
                        before, begun = shared_cpu(end), time.perf_counter()
                        rate = (
                            decode_rate(end, chosen.tokens, streams)
                            if streams
                            else prefill_rate(end, 1000 + turn)
                        )
                        share = (shared_cpu(end) - before) / (time.perf_counter() - begun)
                        if turn or not streams:  # the first turn shows the pipeline what its stages take
                            rates[index].append(rate)
                            shares[index].append(share * 100)
                table.add(
                    label,
                    *(Spread.of(found).text(1) for found in rates),
                    ratios(*rates).text(),
                    *(Spread.of(found).text(0) for found in shares),
                )
    table.notes.append(f"cut: layers {head} and {tail}")
    table.notes.append("wanted: 16 streams 1.6, 8 streams 1.25, prompt 1.35")
    table.publish("capacity", keep=chosen.keep)


if __name__ == "__main__":
    main()
