"""Pictures of every tab for the docs, from a real mesh of four nodes.

`make screenshots` writes docs/img/*.png. Needs chromium and the built dashboard.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import ROOT
from playwright.async_api import Browser, Page, async_playwright

sys.path.insert(0, str(ROOT / "tests"))
from support.mesh import Mesh, run_mesh
from web.conftest import FLAGS

OUT = ROOT / "docs" / "img"
NODES = {"attic": "0-14", "cellar": "15-29", "laptop": "10-29", "workshop": "0-14"}
QUESTION = "Write a short story about a lighthouse keeper, in three paragraphs."
WIDE, PHONE = (1280, 800), (360, 740)


def prepare(mesh: Mesh) -> list[str]:
    """Starts the mesh, sets a price, and makes keys for a small household. Returns the use keys' secrets."""
    mesh.start_tracker()
    for name, layers in NODES.items():
        mesh.start_node(name, layers)
    mesh.wait_ready()
    with mesh.client(admin=True) as client:
        price = {"model": "*", "input": 1_000_000, "output": 4_000_000}
        client.post("/api/prices", json=price).raise_for_status()
        client.post("/api/accounts/home/deposits", json={"amount": 25_000_000}).raise_for_status()
        secrets = []
        for name in ("phone", "kitchen", "backup job"):
            made = client.post("/api/keys", json={"account": "home", "name": name}).raise_for_status()
            secrets.append(str(made.json()["secret"]))
    return secrets


def ask(mesh: Mesh, secret: str, tokens: int, *, stream: bool = True) -> None:
    """One call to its end."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": tokens,
        "stream": stream,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    headers = {"Authorization": f"Bearer {secret}"}
    with mesh.client(timeout=300) as client:
        client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()


async def keep_busy(mesh: Mesh, secrets: list[str]) -> None:
    """Three calls in flight, over and over."""

    async def one(number: int) -> None:
        while True:
            await asyncio.to_thread(ask, mesh, secrets[number], 160 + 60 * number, stream=number != 1)

    await asyncio.gather(*(one(number) for number in range(len(secrets))))


async def open_page(browser: Browser, mesh: Mesh, size: tuple[int, int], scheme: str) -> Page:
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = await context.new_page()
    await page.goto(f"{mesh.root}/dashboard#key={mesh.info['admin_key']}")
    await page.get_by_role("link", name="Chat", exact=True).wait_for()
    return page


async def shoot(page: Page, tab: str, name: str) -> None:
    await page.locator(f"nav a[href='/dashboard/{tab}']").first.click()
    await page.locator("main h1").first.wait_for()
    await page.wait_for_timeout(1_500)
    await picture(page, name)


async def picture(page: Page, name: str) -> None:
    await page.mouse.move(0, 0)
    await page.wait_for_timeout(200)
    await page.screenshot(path=OUT / f"{name}.png")


async def chat(page: Page, name: str) -> None:
    await page.locator("nav a[href='/dashboard/chat']").first.click()
    await page.get_by_role("button", name="System prompt and parameters").click()
    await page.get_by_label("Longest answer").fill("220")
    await page.get_by_label("Seed").fill("7")
    await page.get_by_role("button", name="System prompt and parameters").click()
    await page.get_by_label("Message", exact=True).fill(QUESTION)
    await page.keyboard.press("Enter")
    await page.get_by_test_id("answer-footer").wait_for(timeout=180_000)
    await page.wait_for_timeout(500)
    await picture(page, name)


async def pictures(mesh: Mesh, secrets: list[str]) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        busy = asyncio.create_task(keep_busy(mesh, secrets))
        try:
            page = await open_page(browser, mesh, WIDE, "light")
            await page.locator("nav a[href='/dashboard/calls']").click()
            await page.get_by_test_id("ended-call").nth(2).wait_for(timeout=300_000)
            for tab in ("mesh", "calls", "console", "routing", "accounts"):
                await shoot(page, tab, tab)
            await page.locator("nav a[href='/dashboard/calls']").click()
            await page.get_by_test_id("ended-call").first.get_by_role("link").click()
            await page.get_by_test_id("call-detail").locator(".timeline li").first.wait_for()
            await picture(page, "call")
            dark = await open_page(browser, mesh, WIDE, "dark")
            await shoot(dark, "mesh", "mesh-dark")
        finally:
            busy.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await busy
        await chat(page, "chat")
        phone = await open_page(browser, mesh, PHONE, "dark")
        await chat(phone, "chat-phone-dark")
        await browser.close()


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, run_mesh(Path(folder)) as mesh:
        secrets = prepare(mesh)
        asyncio.run(pictures(mesh, secrets))


if __name__ == "__main__":
    main()
