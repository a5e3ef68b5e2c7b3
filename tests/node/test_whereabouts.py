"""When the line to the tracker is made anew."""

from __future__ import annotations

import asyncio

from meshnet.node.whereabouts import LOOK_S, Whereabouts, own_address, what_happened


def test_sleep_and_another_address_are_told_apart() -> None:
    assert what_happened(0.1, "10.0.0.2", "10.0.0.2") == ""
    assert what_happened(0.1, "10.0.0.2", None) == ""  # no Wi-Fi for a moment
    assert what_happened(0.1, None, "10.0.0.2") == ""
    assert what_happened(9.0, "10.0.0.2", "10.0.0.2") == "this machine slept for 9 s"
    assert "is 10.0.0.9 now, it was 10.0.0.2" in what_happened(9.0, "10.0.0.2", "10.0.0.9")


def test_the_own_address_is_the_one_towards_the_tracker() -> None:
    assert own_address("http://127.0.0.1:8080") == "127.0.0.1"
    assert own_address("http://no-such-host.invalid:8080") is None


async def test_a_change_is_told_once() -> None:
    found = ["10.0.0.2", "10.0.0.2", None, "10.0.0.9"]
    told: list[str] = []
    looking = Whereabouts(
        "t", told.append, lambda _: found.pop(0) if len(found) > 1 else found[0], lambda: 0.0
    )
    assert looking.address == "10.0.0.2"
    task = asyncio.create_task(looking.run())
    async with asyncio.timeout(20 * LOOK_S):
        while not told:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * LOOK_S)
    task.cancel()
    assert len(told) == 1
    assert looking.address == "10.0.0.9"
