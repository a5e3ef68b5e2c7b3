"""Frames of the dashboard while it is busy: ten thousand tokens in one answer, two hundred calls on the wall.

Needs chromium and the built dashboard. A scripted tracker (tests/web/scripted.py) sends what a real mesh
would; the page is the real one. A frame is the time between two animation frames, as the clock has it: on a
machine that does other things as well, it counts them too. So each frame over the limit is also told by the
CPU time that the page's main thread had in it, from the browser's trace. A task is a piece of work on that
thread, in CPU time: what the page itself costs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from figures import ROOT, Spread, Table, parser
from playwright.async_api import Page, async_playwright

sys.path.insert(0, str(ROOT / "tests"))
from web.conftest import FLAGS

LIMIT_MS = 50.0
IDLE_MS = 16.0
"""A frame over the limit in which the page's main thread had less CPU time than this was late for others."""
ANSWERS = {
    "long": "10,000 tokens, in paragraphs",
    "longline": "10,000 tokens, one paragraph",
    "longcode": "10,000 tokens, one block of code",
    "longlist": "10,000 tokens, one list",
    "longtable": "10,000 tokens, one table",
}
CATEGORIES = ["toplevel", "devtools.timeline", "blink.user_timing"]
PARTS = {
    "FireAnimationFrame": "script",
    "EventDispatch": "script",
    "TimerFire": "script",
    "RunMicrotasks": "script",
    "UpdateLayoutTree": "style",
    "Layout": "layout",
    "PrePaint": "paint",
    "Paint": "paint",
    "Layerize": "paint",
    "MinorGC": "collection",
    "MajorGC": "collection",
}
"""What the browser's names in a trace are, for whoever reads the table."""

RECORD = """() => {
  const seen = (window.seen = { frames: [], on: true });
  let last = performance.now();
  performance.mark('recording', { startTime: last });
  const frame = (now) => {
    seen.frames.push(now - last);
    last = now;
    if (seen.on) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""


@dataclass(frozen=True)
class Task:
    """A piece of work of the page's main thread: when, its CPU time and that of its parts, in ms."""

    start: float
    wall: float
    cpu: float
    parts: dict[str, float]

    def within(self, start: float, end: float) -> float:
        """CPU milliseconds of it between two times."""
        overlap = min(self.start + self.wall, end) - max(self.start, start)
        return self.cpu * overlap / self.wall if overlap > 0 and self.wall > 0 else 0.0

    def text(self) -> str:
        listed = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {cpu:.0f}" for name, cpu in listed if cpu >= 0.5)


@dataclass(frozen=True)
class Frames:
    """Every frame of one run by the clock, in ms, and every task of the main thread."""

    frames: list[float]
    tasks: list[Task]

    @property
    def longest(self) -> float:
        return max(self.frames)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.frames, n=100)[98]

    @property
    def heaviest(self) -> Task:
        return max(self.tasks, key=lambda task: task.cpu)

    def over(self) -> list[float]:
        """For each frame over the limit, the CPU milliseconds of the page's main thread in it."""
        found, start = [], 0.0
        for frame in self.frames:
            if frame > LIMIT_MS:
                found.append(sum(task.within(start, start + frame) for task in self.tasks))
            start += frame
        return found


@contextmanager
def scripted() -> Iterator[str]:
    """The scripted tracker in a process of its own; gives the link that signs in."""
    command = [sys.executable, "-m", "web.scripted", "--port", "0", "--calls", "0"]
    process = subprocess.Popen(command, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


async def recorded(page: Page, work: Callable[[], Awaitable[Any]]) -> Frames:
    browser = page.context.browser
    assert browser is not None
    await browser.start_tracing(page=page, categories=CATEGORIES)
    await page.evaluate(RECORD)
    await work()
    frames = await page.evaluate("() => { seen.on = false; return seen.frames }")
    return Frames(frames, main_thread(json.loads(await browser.stop_tracing())["traceEvents"]))


def main_thread(trace: list[dict[str, Any]]) -> list[Task]:
    """The tasks of the page's main thread since the recording began."""
    begin = next(event for event in trace if event["name"] == "recording" and event["ph"] != "E")
    events = sorted(
        (
            event
            for event in trace
            if (event["pid"], event["tid"]) == (begin["pid"], begin["tid"])
            and "tdur" in event
            and event["ts"] >= begin["ts"]
        ),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    tasks: list[Task] = []
    inside = 0.0
    for event in events:
        start = (event["ts"] - begin["ts"]) / 1000
        if event["name"] == "ThreadControllerImpl::RunTask":
            tasks.append(Task(start, event["dur"] / 1000, event["tdur"] / 1000, {}))
        elif event["name"] in PARTS and tasks and start >= inside:
            # What is inside another part counts for that one alone.
            inside = start + event["dur"] / 1000
            parts, name = tasks[-1].parts, PARTS[event["name"]]
            parts[name] = parts.get(name, 0.0) + event["tdur"] / 1000
    return tasks


async def answer(page: Page, script: str, words: int) -> Frames:
    """One answer of so many words, from the question to its rendered end."""
    await page.get_by_role("link", name="Chat", exact=True).click()
    await page.get_by_role("link", name="New chat").click()
    await page.get_by_label("Message", exact=True).fill(script)

    async def work() -> None:
        await page.keyboard.press("Enter")
        footer = page.get_by_test_id("answer-footer")
        await footer.wait_for(timeout=300_000)
        assert f"{words:,} tokens" in await footer.inner_text()
        await page.wait_for_timeout(300)

    return await recorded(page, work)


async def wall(page: Page, calls: int, tokens: int) -> Frames:
    """So many calls at once, from the first to the last on the wall."""
    await page.get_by_role("link", name="Calls").click()
    await page.get_by_text("no in-flight requests").wait_for()

    async def work() -> None:
        await page.evaluate(
            "body => fetch('/scripted/calls', { method: 'POST', body: JSON.stringify(body) }).then(() => 0)",
            {"calls": calls, "tokens": tokens},
        )
        rows = most = 0
        while rows or not most:
            rows = await page.get_by_test_id("live-call").count()
            most = max(most, rows)
            await page.wait_for_timeout(200)
        assert most == calls, f"{most} of {calls} calls stood on the wall at once"
        await page.wait_for_timeout(300)

    return await recorded(page, work)


async def measure(link: str, repeats: int) -> dict[str, list[Frames]]:
    found: dict[str, list[Frames]] = {}
    path = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        for _ in range(repeats):
            context = await browser.new_context(viewport={"width": 1280, "height": 900})
            page = await context.new_page()
            await page.goto(link)
            await page.get_by_role("link", name="Chat", exact=True).wait_for()
            for script, name in ANSWERS.items():
                found.setdefault(name, []).append(await answer(page, script, 10_000))
            found.setdefault("200 calls at once", []).append(await wall(page, 200, 400))
            await context.close()
        await browser.close()
    return found


def main() -> int:
    options = parser(__doc__)
    options.set_defaults(repeats=2)
    chosen = options.parse_args()
    with scripted() as link:
        found = asyncio.run(measure(link, chosen.repeats))
    table = Table(
        "Dashboard: frames while it is busy",
        [
            "what",
            "frames",
            "p99 ms",
            "longest ms",
            f"over {LIMIT_MS:.0f} ms",
            f"of these, page under {IDLE_MS:.0f} ms CPU",
            "longest task, CPU ms",
            "what it did, CPU ms",
        ],
    )
    for name, runs in found.items():
        over = [cpu for run in runs for cpu in run.over()]
        table.add(
            name,
            sum(len(run.frames) for run in runs),
            Spread.of(run.p99 for run in runs).text(1),
            Spread.of(run.longest for run in runs).text(1),
            len(over),
            sum(1 for cpu in over if cpu < IDLE_MS),
            Spread.of(run.heaviest.cpu for run in runs).text(1),
            max((run.heaviest for run in runs), key=lambda task: task.cpu).text(),
        )
    table.notes.append("chromium, headless, drawn by software; the tracker and the browser share the cores")
    table.publish("dashboard", keep=chosen.keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
