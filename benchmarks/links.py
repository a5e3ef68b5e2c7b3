"""Slow and far links: a proxy before each node, against the bound of compute plus links."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from capacity import prefill_rate
from figures import Spread, Table, parser, ratios
from stand import (
    Endpoint,
    Node,
    ask,
    completion_of,
    decode_rate,
    free_port,
    halves,
    mesh,
    proposed_cut,
    two_cores,
)
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


VERSE = (
    "The old king walked down to the harbour, looked at the ships, and counted nine of them before the sun "
    "went down. "
)


def copy_rate(end: Endpoint, tokens: int) -> float:
    """Decode tokens per second of a text that repeats what stands in its prompt."""
    (answer,) = ask(end, [completion_of(end, VERSE * 3 + "The old king", tokens)])
    return answer.rate


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options.add_argument("--tokens", type=int, default=40)
    options.add_argument("--delays", type=float, nargs="+", default=[10, 30], help="milliseconds each way")
    chosen = options.parse_args()
    a, b = two_cores()
    head, tail = halves(proposed_cut(1))
    ports = [free_port() for _ in range(4)]
    table = Table("Links", ["link", "near", "far", "bound", "of the bound"])
    copies = Table(
        "Drafts over slow links, tokens/s of a text that copies from its prompt",
        ["link", "without drafts", "with drafts", "with / without"],
    )
    with tempfile.TemporaryDirectory() as name, links(ports) as between, ExitStack() as stack:
        folder = Path(name)

        def start(what: str, first: int, *arguments: str) -> Endpoint:
            nodes = [
                Node(
                    layers,
                    core,
                    arguments=(
                        "--grpc-port",
                        str(ports[index]),
                        "--advertise-grpc-port",
                        str(between.proxies[index].port),
                        *arguments,
                    ),
                )
                for index, (layers, core) in enumerate(zip((head, tail), (a, b), strict=True), first)
            ]
            return stack.enter_context(mesh(what, folder / what, nodes))

        plain, drafting = start("plain", 0, "--no-drafts"), start("drafting", 2)
        for end in (plain, drafting):
            decode_rate(end, 16)
        for delay in chosen.delays:
            near, far, bound = [], [], []
            for _ in range(chosen.repeats):
                between.set()
                near.append(decode_rate(plain, chosen.tokens))
                between.set(delay_s=delay / 1e3)
                far.append(decode_rate(plain, chosen.tokens))
                # A token goes down one link and comes back over another.
                bound.append(1 / (1 / near[-1] + 2 * delay / 1e3))
            share = Spread.of(x / y for x, y in zip(far, bound, strict=True))
            table.add(
                f"{delay:g} ms each way, tokens/s",
                *(Spread.of(values).text(1) for values in (near, far, bound)),
                share.text(),
            )
        for delay in (0.0, *chosen.delays):
            between.set(delay_s=delay / 1e3)
            rates = [
                [copy_rate(end, chosen.tokens) for end in (plain, drafting)] for _ in range(chosen.repeats)
            ]
            without, with_ = ([row[i] for row in rates] for i in range(2))
            copies.add(
                f"{delay:g} ms each way",
                Spread.of(without).text(1),
                Spread.of(with_).text(1),
                ratios(with_, without).text(),
            )
        near, far, bound = [], [], []
        for turn in range(chosen.repeats):
            between.set()
            rate = prefill_rate(plain, 2000 + turn)
            between.set(bytes_per_s=SLOW)
            slow = prefill_rate(plain, 3000 + turn)
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
    table.notes.append("wanted: 0.95 of the bound; a prompt 1 / 1.15 = 0.87; without drafts")
    copies.notes.append("wanted: 1.5 over slow links; near ones are left alone")
    table.publish("links", keep=chosen.keep)
    copies.publish("links_drafts", keep=chosen.keep)


if __name__ == "__main__":
    main()
