"""Kills itself with SIGKILL at the N-th statement of a scenario, for every N, each time in a new process.

Run as a script: `crasher.py WHERE ACKS STEP`. The scenario appends to ACKS what the books have answered, so
that the test can hold the database to it. Prints how many statements the scenario has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from books.kit import START
from sqlalchemy import event

from meshnet.tracker.books import Books, Reservation, Usage, Work
from meshnet.tracker.books.storage import Storage, wall_clock

WORK = (Work("alpha", 15, 100, 10), Work("beta", 15, 100, 10))


class Bomb:
    """Counts what reaches the database and goes off at the N-th."""

    def __init__(self, fuse: int) -> None:
        self.fuse = fuse
        self.count = 0

    def tick(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.fuse:
            os.kill(os.getpid(), signal.SIGKILL)

    def attach(self, storage: Storage) -> None:
        if storage.kind == "sqlite":
            assert storage._connection is not None
            driver: Any = storage._connection.connection.driver_connection
            # Called before every statement, BEGIN and COMMIT included, also those that bypass SQLAlchemy.
            driver.set_trace_callback(self.tick)
        else:
            assert storage._engine is not None
            for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
                event.listen(storage._engine.sync_engine, name, self.tick)


async def scenario(where: str, acks: int, name: str, fuse: int) -> int:
    def ack(*words: object) -> None:
        os.write(acks, (" ".join(map(str, words)) + "\n").encode())

    started = wall_clock()
    books = await Books.open(where, clock=lambda: START + wall_clock() - started)
    key = (await books.keys.list("small"))[0]
    await books.start(f"http://{name}")
    bomb = Bomb(fuse)
    bomb.attach(books.storage)

    async def call(number: int) -> str:
        call_id = f"{name}-{number}"
        answer = await books.reserve(call_id, key, "paid", 100, 50)
        assert isinstance(answer, Reservation), answer
        ack("reserve", call_id)
        return call_id

    first, second, third, fourth = await asyncio.gather(*(call(number) for number in range(4)))
    settled = await books.settle(first, Usage(100, 10, WORK))
    ack("settle", first, settled.charge)
    await books.hold(second, Usage(100, 2, WORK))
    ack("hold", second)
    both = await asyncio.gather(books.confirm(second), books.release(third, "no route"))
    ack("settle", second, both[0].charge)
    ack("release", third)
    await books.refund(first, "garbled")
    ack("refund", first)
    await books.accounts.deposit("small", 7, reference=name)
    ack("deposit", name)
    await books.reserve(f"{name}-free", key, "free", 100, 50)
    await books.settle(f"{name}-free", Usage(100, 10, WORK))
    await books.flush()
    ack("settle", f"{name}-free", 0)
    # The fourth call is never ended: its reservation must not outlive this process for long.
    assert fourth.endswith("-3")
    statements = bomb.count
    if fuse:
        # Fewer statements than in the first run: housekeeping's come when they come.
        os.kill(os.getpid(), signal.SIGKILL)
    await books.close()
    return statements


def main() -> None:
    where, path, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    acks = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    statements = asyncio.run(scenario(where, acks, "whole", 0))
    for fuse in range(1, statements + 1, step):
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(scenario(where, acks, f"k{fuse}", fuse))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"the run that was to die at statement {fuse} ended with {status}")
    sys.stdout.write(f"{statements}\n")


if __name__ == "__main__":
    main()
