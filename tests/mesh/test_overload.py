"""More calls than fit: all end, nobody starves, and nothing grows without bound."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
from support.mesh import Demo

CALLS = 300
LIGHT = 6
PROMPT = "Tell me a story about a lighthouse keeper and the sea."
MORE_BYTES = 256 << 20
"""What 300 calls may add to the processes of the demo, all together."""


@dataclass(frozen=True)
class Outcome:
    status: int
    seconds: float
    retry_after: str
    code: str


async def _call(session: aiohttp.ClientSession, url: str, key: str, **parameters: Any) -> Outcome:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        **parameters,
    }
    begun = time.monotonic()
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        text = await answer.text()
        code = (await answer.json())["error"]["code"] if answer.status != 200 else ""
        if answer.status == 200 and parameters.get("stream"):
            assert text.count("data: [DONE]") == 1
            assert '"error"' not in text
        retry_after = answer.headers.get("retry-after", "")
    return Outcome(answer.status, time.monotonic() - begun, retry_after, code)


def _resident(demo: Demo) -> int:
    pids = [demo.info["tracker_pid"], *(node["pid"] for node in demo.nodes)]
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)


async def test_three_hundred_calls_at_once_all_end(demo: Demo) -> None:
    """Answered, or refused with Retry-After before any work; and a second key's light calls come through."""
    timeout = aiohttp.ClientTimeout(total=280)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        light_key = await _new_key(session, demo, "light")
        before = _resident(demo)
        peak = before
        heavy = [
            asyncio.create_task(_call(session, demo.root, demo.api_key, max_tokens=8, stream=number % 2 == 0))
            for number in range(CALLS)
        ]
        await _queued(demo)
        light = [
            asyncio.create_task(_call(session, demo.root, light_key, max_tokens=2)) for _ in range(LIGHT)
        ]
        waiting = {*heavy, *light}
        unfinished_at_light: int | None = None
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=0.5)
            peak = max(peak, _resident(demo))
            if unfinished_at_light is None and all(task.done() for task in light):
                unfinished_at_light = sum(not task.done() for task in heavy)
    outcomes = [task.result() for task in heavy]
    answered = [one for one in outcomes if one.status == 200]
    refused = [one for one in outcomes if one.status != 200]
    assert len(answered) >= 200, {one.code for one in refused}
    assert all(one.status in (429, 503) and int(one.retry_after) >= 1 for one in refused), refused
    assert all(task.result().status == 200 for task in light)
    assert unfinished_at_light is not None
    assert unfinished_at_light > CALLS // 4, "light calls waited for the other key's queue"
    assert peak - before < MORE_BYTES, f"{(peak - before) >> 20} MiB more"
    table = demo.get("/api/calls")["calls"]
    assert not [call for call in table if call["ended_ms"] is None]


async def _new_key(session: aiohttp.ClientSession, demo: Demo, name: str) -> str:
    headers = {"Authorization": f"Bearer {demo.admin_key}"}
    async with session.post(
        f"{demo.root}/api/accounts", json={"name": name, "unlimited": True}, headers=headers
    ) as answer:
        assert answer.status == 201, await answer.text()
    async with session.post(
        f"{demo.root}/api/keys", json={"account": name, "name": name}, headers=headers
    ) as answer:
        assert answer.status == 201, await answer.text()
        return str((await answer.json())["secret"])


async def _queued(demo: Demo) -> None:
    """Until calls wait for room."""
    deadline = time.monotonic() + 60.0
    while True:
        calls = (await asyncio.to_thread(demo.get, "/api/calls"))["calls"]
        if any(call["phase"] == "queued" for call in calls):
            return
        assert time.monotonic() < deadline, "no call ever waited"
        await asyncio.sleep(0.02)
