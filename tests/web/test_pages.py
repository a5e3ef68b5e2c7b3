"""The dashboard around the tabs: signing in, addresses, the event stream, what loads, who may see what."""

from __future__ import annotations

import asyncio
import gzip
import re

import pytest
from playwright.async_api import Page, expect
from web.conftest import Watched, axe_source
from web.scripted import ADMIN_KEY, DIST, USE_KEY, ScriptedTracker

pytestmark = pytest.mark.asyncio(loop_scope="session")

TABS = ("mesh", "chat", "calls", "console", "routing", "accounts")


async def test_a_link_signs_in_and_its_key_is_gone_at_once(page: Page, scripted: ScriptedTracker) -> None:
    await page.goto(f"{scripted.base}/dashboard#key={ADMIN_KEY}")
    await expect(page.get_by_role("link", name="Mesh", exact=True)).to_be_visible()
    assert page.url == f"{scripted.base}/dashboard/mesh"
    assert ADMIN_KEY not in await page.evaluate(
        "JSON.stringify([location.href, document.cookie, {...localStorage}])"
    )
    cookie = next(c for c in await page.context.cookies() if c["name"] == "meshnet_session")
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    await page.reload()
    await expect(page.get_by_role("link", name="Mesh", exact=True)).to_be_visible()


async def test_a_key_is_asked_for_and_a_wrong_one_refused(page: Page, scripted: ScriptedTracker) -> None:
    await page.goto(f"{scripted.base}/dashboard/calls")
    field = page.get_by_label("Key")
    await expect(field).to_be_focused()
    await field.fill("mn-wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("this key is not known here")
    await expect(field).to_have_value("")
    await field.fill(ADMIN_KEY)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Calls in flight")).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()
    await expect(field).to_be_visible()
    await page.reload()
    await expect(field).to_be_visible()


async def test_every_tab_has_an_address_and_the_back_button_works(
    signed_in: Page, scripted: ScriptedTracker
) -> None:
    for tab in TABS:
        await signed_in.get_by_role("link", name=tab.capitalize(), exact=False).first.click()
        assert signed_in.url == f"{scripted.base}/dashboard/{tab}"
        await expect(signed_in).to_have_title(f"{tab.capitalize()} · meshnet")
        await expect(signed_in.locator("nav a[aria-current=page]")).to_contain_text(tab.capitalize())
    for tab in TABS[-2::-1]:
        await signed_in.go_back()
        assert signed_in.url == f"{scripted.base}/dashboard/{tab}"
        await expect(signed_in.locator("nav a[aria-current=page]")).to_contain_text(tab.capitalize())
    for tab in TABS:
        await signed_in.goto(f"{scripted.base}/dashboard/{tab}")
        await expect(signed_in.locator("main h1, main h2").first).to_be_visible()


async def test_a_call_has_an_address(signed_in: Page, scripted: ScriptedTracker) -> None:
    await scripted.run_call(4, 0.05)
    call_id = next(iter(scripted.calls))
    await signed_in.goto(f"{scripted.base}/dashboard/calls/{call_id}")
    detail = signed_in.get_by_test_id("call-detail")
    await expect(detail).to_contain_text(call_id)
    for phase in ("accepted", "route selected", "generating", "complete"):
        await expect(detail.locator(".timeline")).to_contain_text(phase)
    await signed_in.goto(f"{scripted.base}/dashboard/calls/nowhere")
    await expect(detail).to_contain_text("there is no call 'nowhere'")


async def test_it_works_by_keyboard(signed_in: Page) -> None:
    await signed_in.get_by_role("link", name="Mesh", exact=True).click()
    await signed_in.reload()
    await signed_in.get_by_role("heading", name="Mesh").wait_for()
    await signed_in.keyboard.press("Tab")
    await expect(signed_in.get_by_text("Skip to the content")).to_be_focused()
    await signed_in.keyboard.press("Tab")
    await signed_in.keyboard.press("Tab")
    await expect(signed_in.get_by_role("link", name="Mesh", exact=True)).to_be_focused()
    await signed_in.keyboard.press("ArrowRight")
    await signed_in.keyboard.press("ArrowRight")
    await expect(signed_in.get_by_role("link", name="Calls")).to_be_focused()
    await signed_in.keyboard.press("Enter")
    await expect(signed_in.get_by_role("heading", name="Calls in flight")).to_be_visible()


async def test_the_banner_says_that_the_stream_broke_and_goes_by_itself(
    signed_in: Page, scripted: ScriptedTracker
) -> None:
    banner = signed_in.get_by_text("The connection to the tracker broke")
    await expect(banner).to_be_hidden()
    scripted.drop_viewers(silence_s=2.0)
    await expect(banner).to_be_visible()
    await expect(banner).to_be_hidden()
    call = scripted.new_call()
    await signed_in.get_by_role("link", name="Calls").click()
    await expect(signed_in.locator(f"[data-call={call['id']}]")).to_be_visible()


async def test_the_wall_shows_calls_as_they_run_and_cancels_them(
    signed_in: Page, scripted: ScriptedTracker
) -> None:
    await signed_in.get_by_role("link", name="Calls").click()
    await expect(signed_in.get_by_text("no in-flight requests")).to_be_visible()
    call = scripted.new_call(stream=False, key="phone")
    row = signed_in.locator(f"[data-testid=live-call][data-call={call['id']}]")
    await expect(row).to_contain_text("queued")
    await expect(row).to_contain_text("not streamed")
    scripted.change(call, phase="queued", queue_position=2)
    await expect(row).to_contain_text("place 2 in the line")
    stages = scripted.stages(("attic", 0, 14), ("cellar", 15, 29))
    scripted.change(call, phase="generating", stages=stages, queue_position=None)
    await expect(row).to_contain_text("processing")
    await expect(row).to_contain_text("cellar")
    for tokens in (12, 40):
        scripted.change(call, output_tokens=tokens, tokens_per_second=31.5)
        await expect(row.get_by_test_id("live-tokens")).to_have_text(str(tokens))
    scripted.change(call, stages=scripted.stages(("attic", 0, 14), ("workshop", 15, 29)), reroutes=1)
    await expect(row).to_contain_text("rerouted")
    await expect(row).to_contain_text("workshop")
    await row.get_by_role("button", name="Cancel the call").click()
    await expect(row).to_have_count(0)
    ended = signed_in.locator(f"[data-testid=ended-call][data-call={call['id']}]")
    await expect(ended).to_contain_text("cancelled")
    await expect(signed_in.get_by_text("no in-flight requests")).to_be_visible()
    await signed_in.get_by_label("Outcome").select_option("failed")
    await expect(ended).to_have_count(0)
    await signed_in.get_by_label("Outcome").select_option("rerouted")
    await expect(ended).to_be_visible()


async def test_a_call_shorter_than_a_frame_still_shows(signed_in: Page, scripted: ScriptedTracker) -> None:
    await signed_in.get_by_role("link", name="Calls").click()
    await expect(signed_in.get_by_text("no in-flight requests")).to_be_visible()
    call = scripted.new_call()
    scripted.change(call, phase="complete", output_tokens=1)
    await expect(signed_in.locator(f"[data-testid=ended-call][data-call={call['id']}]")).to_be_visible()


async def test_the_mesh_shows_gaps_and_how_to_fill_them(page: Page) -> None:
    tracker = ScriptedTracker(gap=True)
    base = await tracker.start()
    try:
        await page.goto(f"{base}/dashboard/mesh#key={ADMIN_KEY}")
        gap = page.get_by_test_id("gap")
        await expect(gap).to_contain_text("22–29")
        await expect(gap).to_contain_text("meshnet node --model")
        await expect(page.get_by_text("incomplete")).to_be_visible()
        picture = page.get_by_role("img", name=re.compile("Missing layers: 22 to 29"))
        await expect(picture).to_be_visible()
    finally:
        await tracker.stop()


async def test_nodes_are_drained_and_a_join_command_is_made(signed_in: Page) -> None:
    await signed_in.get_by_role("link", name="Mesh", exact=True).click()
    card = signed_in.locator("[data-node=cellar]")
    await expect(card).to_contain_text("trust 62 %")
    await expect(signed_in.locator("[data-node=attic]")).not_to_contain_text("trust")
    await card.get_by_role("button", name="Drain", exact=True).click()
    await expect(card).to_contain_text("draining")
    await expect(signed_in.get_by_text("3 of 4 nodes ready")).to_be_visible()
    await card.get_by_role("button", name="Undo drain").click()
    await expect(card).not_to_contain_text("draining")
    await signed_in.get_by_role("button", name="Add a node").click()
    await signed_in.get_by_role("button", name="Make the command").click()
    await expect(signed_in.get_by_test_id("join-command")).to_contain_text("meshnet node --join")
    await signed_in.keyboard.press("Escape")
    await expect(signed_in.get_by_role("dialog")).to_have_count(0)


async def test_models_are_loaded_and_let_go_of(signed_in: Page) -> None:
    await signed_in.get_by_role("link", name="Mesh", exact=True).click()
    serving = signed_in.get_by_test_id("serving")
    await serving.get_by_label("Serve a model").fill("another")
    await serving.get_by_role("button", name="Load", exact=True).click()
    entry = serving.locator("[data-model=another]")
    await expect(entry).to_contain_text("reading 40 %")
    await entry.get_by_role("button", name="Unload").click()
    await expect(entry).to_have_count(0)


async def test_live_routes_are_drawn_over_the_mesh(signed_in: Page, scripted: ScriptedTracker) -> None:
    await signed_in.get_by_role("link", name="Mesh", exact=True).click()
    lines = signed_in.locator("path.route")
    await expect(lines).to_have_count(0)
    call = scripted.new_call()
    scripted.change(call, phase="generating", stages=scripted.stages(("attic", 0, 14), ("cellar", 15, 29)))
    await expect(lines).to_have_count(1)
    scripted.change(call, phase="complete")
    await expect(lines).to_have_count(0)


async def test_routing_shows_the_plan_and_saves_weights(signed_in: Page, scripted: ScriptedTracker) -> None:
    await signed_in.get_by_role("link", name="Routing").click()
    candidates = signed_in.get_by_test_id("candidate")
    await expect(candidates.first).to_contain_text("winner")
    await expect(signed_in.get_by_test_id("why")).to_contain_text("attic")
    await expect(signed_in.get_by_test_id("verdict")).to_contain_text(
        "splitting" if False else re.compile("Yes|No")
    )
    await expect(candidates.filter(has_text="standby")).to_have_count(1)
    await candidates.first.get_by_text("Each term").click()
    await expect(candidates.first.locator("td", has_text="decode").first).to_be_visible()
    await signed_in.get_by_label("Weighted cost").check()
    hop = signed_in.get_by_label("Hop: 15 ms each")
    await hop.fill("4")
    await expect(signed_in.get_by_test_id("why")).to_contain_text("cheapest complete route")
    await signed_in.get_by_role("button", name="Save for this model").click()
    await expect(signed_in.get_by_text("New calls use it now")).to_be_visible()
    saved = next(iter(scripted.settings["models"].values()))
    assert (saved["cost_model"], saved["weights"]["hop"]) == ("weighted", 4)
    await signed_in.reload()
    await expect(signed_in.get_by_label("Weighted cost")).to_be_checked()
    await expect(hop).to_have_value("4")


async def test_the_console_filters_and_pauses(signed_in: Page, scripted: ScriptedTracker) -> None:
    await signed_in.get_by_role("link", name="Console").click()
    lines = signed_in.locator("li[data-seq]")
    scripted.log("proxy route selected", "downstream start_layer=15", "c1")
    scripted.log("node lost", "cellar", level="warning")
    await expect(lines).to_have_count(2)
    await signed_in.get_by_label("Level").select_option("warning")
    await expect(lines).to_have_count(1)
    await signed_in.get_by_label("Level").select_option("")
    await signed_in.get_by_label("Filter by text or call id").fill("start_layer=15")
    await expect(lines).to_have_count(1)
    await signed_in.get_by_label("Filter by text or call id").fill("")
    await signed_in.get_by_role("button", name="Pause").click()
    scripted.log("node joined", "cellar")
    await expect(signed_in.get_by_role("button", name="Go on (1 new)")).to_be_visible()
    await expect(lines).to_have_count(2)
    await signed_in.get_by_role("button", name="Go on").click()
    await expect(lines).to_have_count(3)


async def test_accounts_show_money_keys_suspects_and_a_calls_ledger(
    signed_in: Page, scripted: ScriptedTracker
) -> None:
    await signed_in.get_by_role("link", name="Accounts").click()
    main = signed_in.get_by_role("main")
    await expect(main.get_by_role("img", name=re.compile("Spending per day over 30 days"))).to_be_visible()
    assert await signed_in.evaluate("document.querySelector('canvas').toDataURL().length") > 3_000
    await expect(main).to_contain_text("21.50")
    await expect(main).to_contain_text("5.00 a month")
    await main.get_by_role("link", name="c000042").click()
    assert signed_in.url == f"{scripted.base}/dashboard/accounts/c000042"
    ledger = signed_in.get_by_test_id("call-ledger")
    await expect(ledger).to_contain_text("0.000042")
    await expect(ledger).to_contain_text("node:id-attic")
    await expect(ledger.get_by_role("button", name="Refund")).to_be_visible()


async def test_a_use_key_sees_only_its_part(page: Page, scripted: ScriptedTracker) -> None:
    await page.goto(f"{scripted.base}/dashboard#key={USE_KEY}")
    await expect(page.get_by_label("Message", exact=True)).to_be_visible()
    assert page.url == f"{scripted.base}/dashboard/chat"
    await expect(page.get_by_role("link", name="Routing")).to_have_count(0)
    await page.get_by_role("link", name="Accounts").click()
    await expect(page.get_by_role("main")).to_contain_text("12.345678")
    await page.goto(f"{scripted.base}/dashboard/routing")
    await expect(page.get_by_text("Routing needs a key with the scope “admin”")).to_be_visible()
    await page.goto(f"{scripted.base}/dashboard/mesh")
    await expect(page.get_by_role("heading", name="Nodes")).to_have_count(0)
    await expect(page.get_by_role("button", name="Add a node")).to_have_count(0)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "light"),
        (1280, "dark"),
        pytest.param(360, "dark", marks=pytest.mark.full),
        pytest.param(1280, "light", marks=pytest.mark.full),
    ],
)
async def test_axe_finds_no_fault(
    signed_in: Page, scripted: ScriptedTracker, scheme: str, width: int
) -> None:
    await signed_in.emulate_media(color_scheme=scheme)
    await signed_in.set_viewport_size({"width": width, "height": 760})
    for reroutes in (0, 1):
        call = scripted.new_call()
        scripted.change(
            call,
            phase="generating",
            reroutes=reroutes,
            stages=scripted.stages(("attic", 0, 14), ("cellar", 15, 29)),
        )
    scripted.change(scripted.new_call(), phase="failed", error={"code": "route_lost", "message": "gone"})
    scripted.log("node lost", "cellar", level="error")
    await signed_in.get_by_label("Message", exact=True).fill("Tell me about it, think")
    await signed_in.keyboard.press("Enter")
    await signed_in.get_by_test_id("answer-footer").wait_for()
    await signed_in.evaluate(axe_source())
    faults: list[str] = []
    for tab in TABS:
        await signed_in.locator(f"nav[aria-label^=Parts] a[href$='/{tab}']").click()
        await signed_in.locator("main h1").first.wait_for()
        if tab == "chat":
            await signed_in.go_back()
            await signed_in.go_forward()
        await asyncio.sleep(0.4)
        found = await signed_in.evaluate(
            "axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] })"
        )
        faults += [
            f"{tab}: {v['id']}: {node['target']} {node['failureSummary']}"
            for v in found["violations"]
            for node in v["nodes"]
        ]
        wider = await signed_in.evaluate("document.documentElement.scrollWidth - innerWidth")
        if wider > 0:
            faults.append(f"{tab} is {wider} pixels wider than a {width} pixel page")
    assert faults == [], "\n".join(faults)


async def test_the_theme_can_be_set(signed_in: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = await signed_in.evaluate(background)
    await signed_in.emulate_media(color_scheme="dark")
    dark = await signed_in.evaluate(background)
    assert light != dark
    await signed_in.get_by_role("button", name="Colours: system").click()
    assert await signed_in.evaluate(background) == light
    await signed_in.reload()
    await signed_in.get_by_role("button", name="Colours: light").wait_for()
    assert await signed_in.evaluate(background) == light
    await signed_in.get_by_role("button", name="Colours: light").click()
    assert await signed_in.evaluate(background) == dark


async def test_it_asks_nobody_but_the_tracker_and_loads_little(
    signed_in: Page, scripted: ScriptedTracker, watched: Watched
) -> None:
    for tab in TABS:
        await signed_in.goto(f"{scripted.base}/dashboard/{tab}")
        await signed_in.locator("main h1").first.wait_for()
    assert {url.split("/")[2] for url in watched.requests if url.startswith("http")} == {
        scripted.base.removeprefix("http://")
    }
    files = {url.split("/dashboard/")[1] for url in watched.requests if "/dashboard/assets/" in url}
    sizes = {name: len(gzip.compress((DIST / name).read_bytes(), 9)) for name in [*files, "index.html"]}
    assert sum(sizes.values()) < 150_000, sizes
