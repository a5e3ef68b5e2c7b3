"""Debian's chromium for the tests of this folder, one per test session, and a fresh profile for each test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect
from web.scripted import ADMIN_KEY, DIST, ScriptedTracker

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_MS = 30_000
expect.set_options(timeout=15_000)


@dataclass
class Watched:
    """What a page did that no test may leave unseen."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, headless."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("chromium is not installed: apt-get install chromium")
    if not (DIST / "index.html").exists():
        pytest.fail("the dashboard is not built: npm ci && npm run build in web/")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        await running.close()


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A profile of its own: no cookies, no stored conversations."""
    made = await browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    made.set_default_timeout(TIMEOUT_MS)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def watched() -> Watched:
    """Filled by `page`."""
    return Watched()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext, watched: Watched) -> AsyncIterator[Page]:
    """A page; uncaught errors and refusals by the CSP fail its test."""
    made = await context.new_page()
    made.on("pageerror", lambda error: watched.errors.append(f"uncaught: {error}"))
    made.on("request", lambda request: watched.requests.append(request.url))

    def heard(message: Any) -> None:
        if "Content Security Policy" in message.text:
            watched.errors.append(message.text)

    made.on("console", heard)
    yield made
    assert watched.errors == []


@pytest_asyncio.fixture(loop_scope="session")
async def scripted() -> AsyncIterator[ScriptedTracker]:
    """A scripted tracker that serves the built dashboard; `base` is its address."""
    tracker = ScriptedTracker()
    tracker.base = await tracker.start()
    yield tracker
    await tracker.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def signed_in(page: Page, scripted: ScriptedTracker) -> Page:
    """A page on the scripted tracker, signed in with the admin key, on the chat."""
    await page.goto(f"{scripted.base}/dashboard/chat#key={ADMIN_KEY}")
    await page.get_by_label("Message", exact=True).wait_for()
    return page


def axe_source() -> str:
    """The accessibility checker, from the dashboard's development packages."""
    path = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        pytest.fail(f"{path} is missing: npm ci in web/")
    return path.read_text()
