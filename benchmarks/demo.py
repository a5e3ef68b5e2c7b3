"""The demo's figures: ready, first token and decode speed, over two nodes and with the whole model on one."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from figures import ROOT, Spread, Table, parser, ratios

sys.path.insert(0, str(ROOT / "tests"))
from support.mesh import Demo, run_demo

PROMPT = "Write a long story about a lighthouse keeper and the sea."


def measure(demo: Demo, tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token, and decode tokens/s after it, of one streamed greedy answer."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    used = 0
    start = time.perf_counter()
    with demo.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                used = chunk["usage"]["completion_tokens"]
            elif chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
    return (first - start) * 1e3, (used - 1) / (last - first)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument(
        "--threads", type=int, default=0, help="compute threads per node; 0: the demo's choice"
    )
    chosen = options.parse_args()
    threads = ["--threads", str(chosen.threads)] if chosen.threads else []
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        start = time.perf_counter()
        with run_demo(Path(two), "--cuts", "15", *threads) as split:
            ready = time.perf_counter() - start
            with run_demo(Path(one), "--cuts", "", *threads) as whole:
                for demo in (split, whole):
                    measure(demo, 8)
                pairs = [
                    (measure(split, chosen.tokens), measure(whole, chosen.tokens))
                    for _ in range(chosen.repeats)
                ]
    table = Table("The demo", ["", "two nodes, cut at 15", "whole model on one node", "ratio"])
    first = [[pair[i][0] for pair in pairs] for i in (0, 1)]
    speed = [[pair[i][1] for pair in pairs] for i in (0, 1)]
    table.add(
        "first token, ms", Spread.of(first[0]).text(0), Spread.of(first[1]).text(0), ratios(*first).text()
    )
    table.add(
        "decode, tokens/s", Spread.of(speed[0]).text(0), Spread.of(speed[1]).text(0), ratios(*speed).text()
    )
    table.notes.append(f"demo with two nodes ready after {ready:.1f} s")
    table.publish("demo", keep=chosen.keep)


if __name__ == "__main__":
    main()
