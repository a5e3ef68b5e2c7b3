"""Group commit: one task gathers the commands of concurrent calls and carries them out in one transaction.

While a transaction is being committed the next commands gather, so the more calls there are, the more share
one fsync. Commands whose caller waits go at once; if only records of free calls are there, they wait up to
LINGER_S for company. A batch is run again while the database is unavailable or a deadlock was broken (every
command may come twice: the ledger's decisions see that). A batch that fails for another reason (two trackers
were given the same call) is run again command by command, so that one bad command spoils no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from meshnet.tracker.books.batch import Answer, carry_out
from meshnet.tracker.books.ledger import Command
from meshnet.tracker.books.records import BooksUnavailable, Clock
from meshnet.tracker.books.storage import Storage
from meshnet.tracker.patience import begun

MAX_BATCH: Final = 256
MAX_QUEUED: Final = 20_000
LINGER_S: Final = 0.05
FIRST_RETRY_S: Final = 0.02
LAST_RETRY_S: Final = 1.0
GIVE_UP_S: Final = 10.0

log = structlog.get_logger("meshnet.books")


@dataclass(slots=True)
class _Queued:
    """A command, or None for a mark that is reached when all before it is written."""

    command: Command | None
    durable: bool
    done: asyncio.Future[Answer] | None


class Writer:
    """The one task of a process that writes calls and entries.

    Commands are carried out in the order given.
    """

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._queue: deque[_Queued] = deque()
        self._wanted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closing = False
        self._resting = False
        self._begun: Awaitable[None] | None = None
        """A transaction that `submit` began, for the task to see to its end."""
        self._task = asyncio.create_task(self._run(), name="books-writer")

    @property
    def queued(self) -> int:
        """Commands that wait for their transaction."""
        return len(self._queue)

    async def submit(self, command: Command, *, durable: bool = True) -> Answer:
        """Carries out a command; returns its answer once it is committed. Raises BooksUnavailable."""
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._put(_Queued(command, durable, done))
        self._hurry.set()
        if self._resting and self._begun is None and self._storage.in_thread:
            # The thread need not wait until the task has its turn.
            self._begun = begun(self._carry_out(self._batch()))
        return await done

    def post(self, command: Command) -> None:
        """Carries out a command that moves no money, soon.

        Nobody waits. Raises BooksUnavailable when full.
        """
        self._put(_Queued(command, False, None))

    def _put(self, item: _Queued) -> None:
        if self._closing:
            raise BooksUnavailable("the books are being closed")
        if len(self._queue) >= MAX_QUEUED:
            raise BooksUnavailable(f"{MAX_QUEUED} commands wait for the database; it does not keep up")
        self._queue.append(item)
        self._wanted.set()

    async def flush(self) -> None:
        """Returns when all that was given so far is written, whatever comes in meanwhile."""
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._put(_Queued(None, False, done))
        self._hurry.set()
        await done

    async def close(self) -> None:
        """Writes what is queued and ends the task."""
        self._closing = True
        self._hurry.set()
        self._wanted.set()
        await self._task

    async def _run(self) -> None:
        while True:
            self._resting = True
            await self._wanted.wait()
            if self._begun is None and not self._hurry.is_set() and 0 < len(self._queue) < MAX_BATCH:
                try:
                    await asyncio.wait_for(self._hurry.wait(), LINGER_S)
                except TimeoutError:
                    pass
            self._resting = False
            if self._begun is not None:
                transaction, self._begun = self._begun, None
                await transaction
            elif self._queue:
                await self._carry_out(self._batch())
            elif self._closing:
                return
            else:
                self._wanted.clear()

    def _batch(self) -> list[_Queued]:
        """Takes what waits, up to MAX_BATCH commands."""
        batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        if not self._queue and not self._closing:
            self._hurry.clear()
        return batch

    async def _carry_out(self, batch: list[_Queued], *, again: bool = True) -> None:
        try:
            answers = await self._insist(batch)
        except Exception as error:
            if again and not isinstance(error, BooksUnavailable):
                log.warning("books batch run again one by one", commands=len(batch), error=str(error))
                for item in batch:
                    await self._carry_out([item], again=False)
                return
            log.error("books commands failed", commands=len(batch), error=str(error))
            for item in batch:
                if item.done is not None and not item.done.done():
                    item.done.set_exception(error)
            return
        for item, answer in zip(batch, answers, strict=True):
            if item.done is not None and not item.done.done():
                item.done.set_result(answer)

    async def _insist(self, batch: list[_Queued]) -> list[Answer]:
        """Runs the transaction, again and again while the database is merely unavailable, up to GIVE_UP_S."""
        commands = [item.command for item in batch if item.command is not None]
        if not commands:
            return [None] * len(batch)
        durable = any(item.durable for item in batch)
        loop = asyncio.get_running_loop()
        give_up, pause = loop.time() + GIVE_UP_S, FIRST_RETRY_S
        while True:
            transaction = partial(carry_out, commands=commands, now=self._clock())
            try:
                answers = iter(await self._storage.write(transaction, durable=durable, prepared=True))
                return [None if item.command is None else next(answers) for item in batch]
            except BooksUnavailable:
                if loop.time() >= give_up or self._closing:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_S)
