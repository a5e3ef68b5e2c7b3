"""Frames of the dashboard while it is busy: ten thousand tokens in one answer, two hundred calls on the wall.

Needs chromium and the built dashboard. A scripted tracker (tests/web/scripted.py) sends what a real mesh
would; the page is the real one. A frame is the time between two animation frames, as the clock has it: on a
machine that does other things as well, it counts them too. A task is a piece of work on the page's main
thread in CPU time, from the browser's trace: that is what the page itself costs.
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

RECORD = """() => {
  const seen = (window.seen = { frames: [], on: true });
  let last = performance.now();
  const frame = (now) => {
    seen.frames.push(now - last);
    last = now;
    if (seen.on) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""


@dataclass(frozen=True)
class Frames:
    """Milliseconds: every frame of one run by the clock, and every task of the main thread in CPU time."""

    frames: list[float]
    tasks: list[float]

    @property
    def longest(self) -> float:
        return max(self.frames)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.frames, n=100)[98]

    @property
    def over(self) -> int:
        return sum(1 for frame in self.frames if frame > LIMIT_MS)


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
    await page.evaluate(RECORD)
    await browser.start_tracing(page=page, categories=["toplevel"])
    await work()
    trace = json.loads(await browser.stop_tracing())["traceEvents"]
    frames = await page.evaluate("() => { seen.on = false; return seen.frames }")
    return Frames(frames, main_thread_tasks(trace))


def main_thread_tasks(trace: list[dict[str, Any]]) -> list[float]:
    """CPU milliseconds of each task on the busiest renderer's main thread."""
    threads: dict[tuple[int, int], list[float]] = {
        (event["pid"], event["tid"]): []
        for event in trace
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    for event in trace:
        tasks = threads.get((event["pid"], event["tid"]))
        if tasks is not None and event["name"] == "ThreadControllerImpl::RunTask" and "tdur" in event:
            tasks.append(event["tdur"] / 1000)
    return max(threads.values(), key=sum)


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
            found.setdefault("10,000 tokens, in paragraphs", []).append(await answer(page, "long", 10_000))
            found.setdefault("10,000 tokens, one paragraph", []).append(
                await answer(page, "onelongline", 10_000)
            )
            found.setdefault("200 calls at once", []).append(await wall(page, 200, 400))
            await context.close()
        await browser.close()
    return found


def main() -> int:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    chosen = options.parse_args()
    with scripted() as link:
        found = asyncio.run(measure(link, chosen.repeats))
    table = Table(
        "Dashboard: frames while it is busy",
        ["what", "frames", "p99 ms", "longest ms", "over 50 ms", "longest task, CPU ms", "tasks over 50 ms"],
    )
    for name, runs in found.items():
        table.add(
            name,
            sum(len(run.frames) for run in runs),
            Spread.of(run.p99 for run in runs).text(1),
            Spread.of(run.longest for run in runs).text(1),
            sum(run.over for run in runs),
            Spread.of(max(run.tasks) for run in runs).text(1),
            sum(1 for run in runs for task in run.tasks if task > LIMIT_MS),
        )
    table.notes.append("chromium, headless, drawn by software; the tracker and the browser share the cores")
    table.publish("dashboard", keep=chosen.keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
