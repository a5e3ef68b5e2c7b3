"""`--when idle`: when a node rests, and when it works again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshnet.node.rest import Limits, Rest, Use, Watch, decide, keep_resting, on_battery

LIMITS = Limits(others=0.25, calm_s=60.0)


def play(*looks: tuple[float, Use]) -> list[bool]:
    """Whether the node rests after each look."""
    rest = Rest()
    found = []
    for at, use in looks:
        rest = decide(rest, use, at, LIMITS)
        found.append(bool(rest.why))
    return found


def test_use_sends_it_to_rest_and_calm_brings_it_back_after_a_while() -> None:
    busy, calm = Use(0.9), Use(0.02)
    # One short burst is not use.
    assert play((0, Use(0.4)), (2, calm), (4, calm)) == [False, False, False]
    assert play((0, busy), (2, busy)) == [True, True]
    looks = [(0.0, busy), *((2.0 + 2 * i, calm) for i in range(40))]
    rested = play(*looks)
    back = rested.index(False)
    # The average falls below the limit at the first calm look, at 2 s; 60 s later it works again.
    assert looks[back][0] == 62.0
    assert not any(rested[back:])
    # Use in between starts the wait anew.
    assert play((0, busy), (2, calm), (4, calm), (40, busy), (42, calm), (44, calm), (80, calm))[-1]


def test_on_battery_it_rests_at_once() -> None:
    on, off = Use(0.0, on_battery=True), Use(0.0)
    assert play((0, on), (2, off), (61, off), (62, off)) == [True, True, True, False]
    assert "battery" in decide(Rest(), on, 0.0, LIMITS).why


def test_supplies_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    def supply(name: str, **files: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")

    assert not on_battery(tmp_path)
    supply("hidpp_battery_0", type="Battery", status="Discharging", scope="Device")
    assert not on_battery(tmp_path)  # a mouse
    supply("BAT0", type="Battery", status="Discharging")
    assert on_battery(tmp_path)
    supply("AC", type="Mains", online="1")
    assert not on_battery(tmp_path)
    supply("AC", online="0")
    assert on_battery(tmp_path)
    supply("BAT0", status="Full")
    assert not on_battery(tmp_path)


async def test_each_change_is_told_once() -> None:
    looks = [Use(0.9), Use(0.9), Use(0.0), Use(0.0), Use(0.0)]
    told: list[str] = []
    task = asyncio.create_task(
        keep_resting(
            Limits(0.25, 0.0),
            lambda: looks.pop(0) if len(looks) > 1 else looks[0],
            told.append,
            asyncio.get_running_loop().time,
            0.001,
        )
    )
    async with asyncio.timeout(10):
        while len(told) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
    task.cancel()
    assert [bool(why) for why in told] == [True, False]


def test_the_machine_is_looked_at() -> None:
    assert 0.0 <= Watch().look().others <= 1.0
