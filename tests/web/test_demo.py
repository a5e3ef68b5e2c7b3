"""The dashboard on a real mesh: `meshnet demo` with the real model, watched in a real browser."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx2 as httpx
import pytest
from playwright.async_api import Locator, Page, expect
from support.mesh import Demo, Mesh
from web.conftest import axe_source

pytestmark = pytest.mark.asyncio(loop_scope="session")

TABS = ("mesh", "chat", "calls", "console", "routing", "accounts")
LONG = "Write a long story about a lighthouse keeper and the sea, with many details."


async def open_chat(page: Page, demo: Demo, *, longest: int = 400) -> None:
    """Signs in by the demo's link and sets the length of the answer."""
    await page.goto(demo.dashboard_url)
    await set_up(page, longest)


async def set_up(page: Page, longest: int) -> None:
    """Greedy: to `LONG` that answer has more than 1,000 tokens, while a drawn one may end at any."""
    await page.get_by_role("link", name="Chat").click()
    await page.get_by_role("button", name="System prompt and parameters").click()
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_label("Longest answer").fill(str(longest))
    await page.get_by_role("button", name="System prompt and parameters").click()


async def ask(page: Page, text: str = LONG) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def answer(page: Page) -> Locator:
    return page.locator("article[data-role=assistant] .answer")


async def grows(text: Locator, times: int = 5) -> list[int]:
    """Observed lengths of a text until it has grown so often."""
    seen: list[int] = []
    deadline = time.monotonic() + 60
    while len(seen) < times + 1:
        length = len(await text.inner_text())
        if not seen or length > seen[-1]:
            seen.append(length)
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.02)
    return seen


def computed_tokens(demo: Demo) -> int:
    """Tokens that all nodes have computed so far."""
    found = 0.0
    for node in demo.nodes:
        metrics = httpx.get(f"{node['http_url']}/metrics").text
        found += sum(
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith("meshnet_node_step_tokens_total")
        )
    return int(found)


async def in_flight(root: Any) -> list[dict[str, Any]]:
    calls = (await asyncio.to_thread(root.get, "/api/calls"))["calls"]
    return [call for call in calls if call["ended_ms"] is None]


async def test_tokens_arrive_one_by_one_and_the_footer_names_the_nodes(page: Page, demo: Demo) -> None:
    await open_chat(page, demo, longest=48)
    await ask(page)
    lengths = await grows(answer(page))
    assert len(lengths) > 5
    await expect(page.get_by_test_id("run-status")).to_have_text(
        re.compile(r"generating… \d+ tokens · [\d.]+ tok/s")
    )
    footer = page.get_by_test_id("answer-footer")
    await expect(footer).to_contain_text("48 tokens")
    await expect(footer).to_contain_text(re.compile(r"tok/s.*to first token.*0–14.*15–29", re.S))
    await expect(answer(page)).not_to_contain_text("▍")


async def test_stop_keeps_the_text_and_the_nodes_stand_still_within_a_second(page: Page, demo: Demo) -> None:
    await open_chat(page, demo, longest=1000)
    await ask(page)
    await grows(answer(page))
    await page.get_by_test_id("stop").click()
    stopped = time.monotonic()
    await expect(page.get_by_test_id("ending")).to_contain_text("Stopped")
    # Three times the second within which it must stand still; then it has to stay still.
    while True:
        before = await asyncio.to_thread(computed_tokens, demo)
        await asyncio.sleep(0.3)
        if await asyncio.to_thread(computed_tokens, demo) == before:
            break
        assert time.monotonic() - stopped < 3.0
    await asyncio.sleep(1.0)
    assert await asyncio.to_thread(computed_tokens, demo) == before
    assert len(await answer(page).inner_text()) > 10
    assert await in_flight(demo) == []


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "not streamed"])
async def test_a_call_stands_on_the_wall_while_its_tokens_count_up(
    page: Page, demo: Demo, streamed: bool
) -> None:
    await page.goto(demo.dashboard_url)
    await page.get_by_role("link", name="Calls").click()
    await expect(page.get_by_text("no in-flight requests")).to_be_visible()
    body = {
        "model": "smollm2",
        "stream": streamed,
        "max_tokens": 120,
        "temperature": 0,
        "messages": [{"role": "user", "content": LONG}],
    }

    def call() -> httpx.Response:
        with demo.client() as client:
            return client.post("/v1/chat/completions", json=body)

    running = asyncio.create_task(asyncio.to_thread(call))
    row = page.get_by_test_id("live-call")
    await expect(row).to_contain_text("processing")
    await expect(row).to_contain_text("0–14")
    counts: list[int] = []
    while len(counts) < 3:
        text = await row.get_by_test_id("live-tokens").inner_text()
        if int(text.replace(",", "")) > (counts[-1] if counts else 0):
            counts.append(int(text.replace(",", "")))
        assert not running.done(), counts
        await asyncio.sleep(0.05)
    assert (await running).status_code == 200
    await expect(page.get_by_text("no in-flight requests")).to_be_visible()
    ended = page.get_by_test_id("ended-call").first
    await expect(ended).to_contain_text("complete")
    await ended.get_by_role("link").click()
    await expect(page.get_by_test_id("call-detail").locator(".timeline")).to_contain_text("complete")


async def test_a_call_is_cancelled_from_the_wall(page: Page, demo: Demo) -> None:
    await open_chat(page, demo, longest=1000)
    await ask(page)
    await grows(answer(page), 2)
    await page.get_by_role("link", name="Calls").click()
    await page.get_by_role("button", name="Cancel the call").click()
    await expect(page.get_by_text("no in-flight requests")).to_be_visible()
    await expect(page.get_by_test_id("ended-call").first).to_contain_text("cancelled")
    await page.go_back()
    await expect(page.get_by_test_id("stop")).to_have_count(0)
    await expect(answer(page)).not_to_contain_text("▍")


async def test_a_node_is_killed_and_the_answer_completes(page: Page, mesh: Mesh) -> None:
    mesh.start_tracker()
    for name, layers in (("head", "0-14"), ("tail", "15-29"), ("spare", "15-29")):
        mesh.start_node(name, layers)
    await asyncio.to_thread(mesh.wait_ready)
    await page.goto(f"{mesh.root}/dashboard#key={mesh.info['admin_key']}")
    await set_up(page, 160)
    await ask(page)
    await grows(answer(page))
    (call,) = await in_flight(mesh)
    tail = next(stage["name"] for stage in call["stages"] if stage["start_layer"] == 15)
    mesh.nodes[tail].kill()
    footer = page.get_by_test_id("answer-footer")
    await expect(footer).to_contain_text("160 tokens", timeout=90_000)
    await expect(footer).to_contain_text("rerouted")
    await expect(footer).to_contain_text("spare" if tail == "tail" else "tail")
    await expect(page.get_by_test_id("error-bubble")).to_have_count(0)
    await page.get_by_role("link", name="Mesh", exact=True).click()
    await expect(page.locator(f"[data-node={tail}]")).to_contain_text("lost")


async def test_a_reload_in_the_middle_leaves_no_cursor(page: Page, demo: Demo) -> None:
    await open_chat(page, demo, longest=600)
    await ask(page)
    await grows(answer(page), 2)
    # What has come is written to the browser's database every second and a half.
    await asyncio.sleep(2.0)
    await page.reload()
    await expect(page.get_by_test_id("ending")).to_contain_text("Interrupted")
    assert len(await answer(page).inner_text()) > 5
    await expect(page.get_by_text("▍")).to_have_count(0)
    await expect(page.get_by_test_id("stop")).to_have_count(0)


async def test_a_refused_request_is_a_bubble_and_can_be_retried(page: Page, demo: Demo) -> None:
    await open_chat(page, demo, longest=24)
    await page.get_by_role("button", name="System prompt and parameters").click()
    await page.get_by_label("Temperature").fill("99")
    await ask(page)
    await expect(page.get_by_test_id("error-bubble")).to_contain_text("temperature")
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_test_id("error-bubble").get_by_role("button", name="Retry").click()
    await expect(page.get_by_test_id("answer-footer")).to_be_visible()
    await expect(page.get_by_test_id("error-bubble")).to_have_count(0)


@pytest.mark.full
async def test_deep_links_and_no_fault_in_both_themes(page: Page, demo: Demo) -> None:
    await open_chat(page, demo, longest=16)
    await ask(page, "What is the capital of France?")
    await page.get_by_test_id("answer-footer").wait_for()
    faults: list[str] = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        for tab in TABS:
            await page.goto(f"{demo.root}/dashboard/{tab}")
            await expect(page.locator("nav a[aria-current=page]")).to_contain_text(tab.capitalize())
            await page.locator("main h1").first.wait_for()
            await asyncio.sleep(0.5)
            await page.evaluate(axe_source())
            found = await page.evaluate("axe.run()")
            faults += [
                f"{scheme} {tab}: {v['id']}: {node['target']} {node['failureSummary']}"
                for v in found["violations"]
                for node in v["nodes"]
            ]
    assert faults == [], "\n".join(faults)


async def test_a_use_key_gets_no_nodes_and_no_calls_of_others(page: Page, demo: Demo) -> None:
    await page.goto(f"{demo.root}/dashboard#key={demo.api_key}")
    await page.get_by_label("Message", exact=True).wait_for()
    with demo.client(admin=True) as client:
        await asyncio.to_thread(
            client.post,
            "/v1/chat/completions",
            json={"model": "smollm2", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
        )
    await page.get_by_role("link", name="Calls").click()
    await expect(page.get_by_role("heading", name="Calls in flight")).to_be_visible()
    await asyncio.sleep(0.5)
    assert "first admin key" not in await page.get_by_role("main").inner_text()
    refused = await page.evaluate("fetch('/api/nodes').then(answer => answer.status)")
    assert refused == 403


async def test_the_plan_and_the_books_are_the_trackers_own(page: Page, demo: Demo) -> None:
    await page.goto(demo.dashboard_url)
    await page.get_by_role("link", name="Routing").click()
    await expect(page.get_by_test_id("why")).to_contain_text("node-1 (0-14) -> node-2 (15-29)")
    await page.get_by_label("Weighted cost").check()
    await page.get_by_label("Hop: 15 ms each").fill("3")
    await page.get_by_role("button", name="Save for this model").click()
    await expect(page.get_by_text("New calls use it now")).to_be_visible()
    settings = await asyncio.to_thread(demo.get, "/api/settings/routing")
    (saved,) = settings["models"].values()
    assert (saved["cost_model"], saved["weights"]["hop"]) == ("weighted", 3.0)
    await page.get_by_label("Measured time").check()
    await page.get_by_label("Hop: 15 ms each").wait_for()
    await page.get_by_role("button", name="Save for this model").click()

    await page.get_by_role("link", name="Accounts").click()
    await page.get_by_role("button", name="Key", exact=True).click()
    await page.get_by_label("Name").fill("made in the dashboard")
    await page.get_by_role("button", name="Make the key").click()
    secret = await page.get_by_test_id("new-key").inner_text()
    assert secret.startswith("mn-")
    answered = await asyncio.to_thread(
        httpx.get, f"{demo.root}/api/me", headers={"Authorization": f"Bearer {secret}"}
    )
    assert answered.status_code == 200
    await page.keyboard.press("Escape")
    page.once("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    row = page.get_by_role("row", name=re.compile("made in the dashboard"))
    await row.get_by_role("button", name="Revoke").click()
    await expect(row).to_have_count(0)
    answered = await asyncio.to_thread(
        httpx.get, f"{demo.root}/api/me", headers={"Authorization": f"Bearer {secret}"}
    )
    assert answered.status_code == 401
