"""kill -9 between any two writes: no settled entry is lost, no reservation stays for ever."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from books import crasher
from books.kit import Kit

from meshnet.tracker.books.trackers import LEASE_MS


async def crash_everywhere(kit: Kit, acks: Path, step: int) -> int:
    """Runs the scenario and kills it at every `step`-th statement; returns how many statements there are."""
    await kit.books.accounts.deposit("small", 10_000_000)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, crasher.__file__, kit.where, str(acks), str(step)],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return int(done.stdout.splitlines()[-1])


async def recovered(kit: Kit) -> None:
    """The next tracker finds the dead ones and gives back what they had reserved."""
    await kit.books.recover()
    kit.clock.forward(ms=LEASE_MS)
    async with asyncio.timeout(60):
        while await kit.rows("SELECT 1 FROM calls WHERE status IN ('open', 'held')"):
            await kit.books.recover()


async def prove(kit: Kit, acks: Path) -> int:
    """Holds the database to everything that was acknowledged; returns how many acknowledgements there are."""
    report = await kit.books.reports.check()
    assert report.problems == ()
    assert (await kit.books.accounts.get("small")).held == 0
    found = await kit.rows("SELECT id, status, charge FROM calls")
    calls = {row[0]: (row[1], row[2]) for row in found}
    deposits = {row[0] for row in await kit.rows("SELECT reference FROM entries WHERE kind = 'deposit'")}
    text = await asyncio.to_thread(acks.read_text)
    said = [line.split() for line in text.splitlines()]
    for kind, what, *amount in said:
        if kind == "deposit":
            assert what in deposits
            continue
        status, charge = calls[what]
        if kind == "settle":
            assert status in ("settled", "refunded"), (what, status)
            assert charge == int(amount[0])
        elif kind == "refund":
            assert status == "refunded"
        elif kind == "release":
            assert status == "released"
        else:
            assert kind in ("reserve", "hold")
    return len(said)


async def test_killed_between_writes(kit: Kit, tmp_path: Path) -> None:
    statements = await crash_everywhere(kit, tmp_path / "acks", 6)
    assert statements > 30
    await recovered(kit)
    assert await prove(kit, tmp_path / "acks") > statements // 6


@pytest.mark.full
async def test_killed_between_any_two_writes(kit: Kit, tmp_path: Path) -> None:
    statements = await crash_everywhere(kit, tmp_path / "acks", 1)
    await recovered(kit)
    assert await prove(kit, tmp_path / "acks") > statements
