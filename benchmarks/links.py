"""Slow and far links: a proxy before each node, against the bound of compute plus links."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from capacity import prefill_rate
from figures import Spread, Table, parser
from stand import Node, decode_rate, free_port, halves, mesh, proposed_cut, two_cores
from support.proxy import Proxy

HIDDEN_BYTES = 576 * 4
"""Of one token between stages."""
SLOW = 100e6 / 8
"""Bytes per second of a link of 100 Mbit/s."""


class Links:
    """One proxy before each node's data plane, in a thread of its own."""

    def __init__(self, ports: list[int]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.proxies = [Proxy("127.0.0.1", port) for port in ports]
        for proxy in self.proxies:
            asyncio.run_coroutine_threadsafe(proxy.start(), self._loop).result()

    def set(self, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Makes all links so, each way."""
        for proxy in self.proxies:
            change = partial(proxy.set, delay_s=delay_s, bytes_per_s=bytes_per_s)
            self._loop.call_soon_threadsafe(change)

    def close(self) -> None:
        for proxy in self.proxies:
            asyncio.run_coroutine_threadsafe(proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextmanager
def links(ports: list[int]) -> Iterator[Links]:
    """Proxies that end with the block."""
    made = Links(ports)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options.add_argument("--tokens", type=int, default=40)
    options.add_argument("--delays", type=float, nargs="+", default=[10, 30], help="milliseconds each way")
    chosen = options.parse_args()
    a, b = two_cores()
    head, tail = halves(proposed_cut(1))
    ports = [free_port(), free_port()]
    table = Table("Links", ["link", "near", "far", "bound", "of the bound"])
    with tempfile.TemporaryDirectory() as name, links(ports) as between:
        nodes = [
            Node(
                layers,
                core,
                arguments=("--grpc-port", str(port), "--advertise-grpc-port", str(proxy.port)),
            )
            for layers, core, port, proxy in zip((head, tail), (a, b), ports, between.proxies, strict=True)
        ]
        with mesh("two", Path(name) / "two", nodes) as end:
            decode_rate(end, 16)
            for delay in chosen.delays:
                near, far, bound = [], [], []
                for _ in range(chosen.repeats):
                    between.set()
                    near.append(decode_rate(end, chosen.tokens))
                    between.set(delay_s=delay / 1e3)
                    far.append(decode_rate(end, chosen.tokens))
                    # A token goes down one link and comes back over another.
                    bound.append(1 / (1 / near[-1] + 2 * delay / 1e3))
                share = Spread.of(x / y for x, y in zip(far, bound, strict=True))
                table.add(
                    f"{delay:g} ms each way, tokens/s",
                    *(Spread.of(values).text(1) for values in (near, far, bound)),
                    share.text(),
                )
            near, far, bound = [], [], []
            for turn in range(chosen.repeats):
                between.set()
                rate = prefill_rate(end, 2000 + turn)
                between.set(bytes_per_s=SLOW)
                slow = prefill_rate(end, 3000 + turn)
                near.append(rate)
                far.append(slow)
                bound.append(min(rate, SLOW / HIDDEN_BYTES))
            between.set()
            share = Spread.of(x / y for x, y in zip(far, bound, strict=True))
            table.add(
                "100 Mbit/s, prompt of 1,024 tokens, tokens/s",
                *(Spread.of(values).text(0) for values in (near, far, bound)),
                share.text(),
            )
    table.notes.append("near: through the same proxies, without delay; its rate is the compute in the bound")
    table.notes.append("wanted: 0.95 of the bound; a prompt 1 / 1.15 = 0.87")
    table.notes.append("every token makes its own way: this version drafts none ahead")
    table.publish("links", keep=chosen.keep)


if __name__ == "__main__":
    main()
