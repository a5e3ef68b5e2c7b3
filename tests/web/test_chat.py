"""The chat against scripted answers: how it streams, ends, fails, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page, expect
from web.scripted import ScriptedTracker

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator("article[data-role=assistant]")


async def finished(page: Page) -> None:
    await expect(page.get_by_test_id("stop")).to_have_count(0)


async def test_an_answer_is_rendered_and_its_footer_tells_what_it_took(signed_in: Page) -> None:
    await ask(signed_in, "How does a route look?")
    await expect(signed_in.get_by_test_id("answer-footer")).to_contain_text("to first token")
    answer = answers(signed_in)
    await expect(answer.locator("strong")).to_have_text("stages")
    await expect(answer.locator("ol li")).to_have_count(3)
    await expect(answer.locator(".table td").first).to_have_text("attic")
    await expect(answer.locator(".math")).to_contain_text("t_{compute}")
    await expect(answer.locator("code .hljs-keyword").first).to_be_visible()
    footer = signed_in.get_by_test_id("answer-footer")
    await expect(footer).to_contain_text(
        re.compile(r"\d+ tokens.*tok/s.*62 ms.*attic 0–14.*cellar 15–29", re.S)
    )


async def test_the_status_counts_tokens_and_the_cursor_blinks_while_it_streams(signed_in: Page) -> None:
    await ask(signed_in, "slow")
    status = signed_in.get_by_test_id("run-status")
    await expect(status).to_have_text(re.compile(r"generating… \d+ tokens · [\d.]+ tok/s"))
    await expect(answers(signed_in)).to_contain_text("▍")
    seen = set()
    for _ in range(8):
        seen.add(await status.inner_text())
        await asyncio.sleep(0.2)
    assert len(seen) >= 5
    await signed_in.get_by_test_id("stop").click()
    await finished(signed_in)
    await expect(answers(signed_in)).not_to_contain_text("▍")


async def test_waiting_shows_the_place_in_the_queue_and_the_prefill(signed_in: Page) -> None:
    await ask(signed_in, "queued")
    status = signed_in.get_by_test_id("run-status")
    await expect(status).to_have_text(re.compile(r"queued… place \d in the line"))
    await expect(status).to_have_text(re.compile(r"reading the prompt… [\d,]+ of 2,048 tokens"))
    await expect(status).to_have_text(re.compile("generating"))


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_stop_keeps_what_came_and_closes_the_request(
    signed_in: Page, scripted: ScriptedTracker, way: str
) -> None:
    await ask(signed_in, "slow")
    await expect(answers(signed_in)).to_contain_text("keeps one sequence")
    if way == "button":
        stop = signed_in.get_by_test_id("stop")
        await expect(stop).to_have_text("■")
        await stop.click()
    else:
        await signed_in.keyboard.press("Escape")
    await expect(signed_in.get_by_test_id("ending")).to_contain_text("Stopped")
    await expect(answers(signed_in)).to_contain_text("keeps one sequence")
    for _ in range(30):
        if scripted.stopped_streams:
            break
        await asyncio.sleep(0.1)
    assert scripted.stopped_streams == 1


async def test_an_error_in_the_stream_is_a_bubble_and_retry_asks_again(signed_in: Page) -> None:
    await ask(signed_in, "broken")
    bubble = signed_in.get_by_test_id("error-bubble")
    await expect(bubble).to_contain_text("route_lost")
    await expect(bubble).to_contain_text("nothing can stand in")
    await expect(answers(signed_in)).to_contain_text("The mesh keeps")
    await bubble.get_by_role("button", name="Retry").click()
    await expect(answers(signed_in)).to_contain_text("▍")
    await expect(signed_in.get_by_test_id("error-bubble")).to_be_visible()
    await expect(answers(signed_in).get_by_text("2/2")).to_be_visible()


async def test_a_refusal_before_the_first_byte_is_a_bubble_too(signed_in: Page) -> None:
    await ask(signed_in, "refused")
    await expect(signed_in.get_by_test_id("error-bubble")).to_contain_text(
        "layers 15-29 are on no ready node"
    )
    await expect(answers(signed_in)).to_have_count(1)


async def test_a_cut_connection_keeps_the_text_and_says_so(signed_in: Page) -> None:
    await ask(signed_in, "cut")
    await expect(signed_in.get_by_test_id("ending")).to_contain_text("connection was cut")
    await expect(answers(signed_in)).to_contain_text("The mesh keeps one sequence")
    await expect(answers(signed_in)).not_to_contain_text("▍")


async def test_a_missing_done_is_no_fault(signed_in: Page) -> None:
    await ask(signed_in, "undone")
    await expect(signed_in.get_by_test_id("answer-footer")).to_be_visible()
    await expect(signed_in.get_by_test_id("ending")).to_have_count(0)
    await expect(answers(signed_in)).to_contain_text("Whole, though the end mark is missing.")


async def test_answers_in_one_piece(signed_in: Page) -> None:
    await signed_in.get_by_role("button", name="System prompt and parameters").click()
    await signed_in.get_by_label("Stream the answer").uncheck()
    await ask(signed_in, "hello")
    await expect(answers(signed_in)).to_contain_text("An answer in one piece.")
    await expect(signed_in.get_by_test_id("answer-footer")).to_contain_text("7 tokens")


async def test_thoughts_are_folded(signed_in: Page) -> None:
    await ask(signed_in, "think")
    await expect(signed_in.get_by_test_id("answer-footer")).to_be_visible()
    box = answers(signed_in).locator("details")
    await expect(box.locator("summary")).to_have_text(re.compile("Thought for"))
    await expect(box.get_by_text("I should keep it short.")).to_be_hidden()
    await box.locator("summary").click()
    await expect(box.get_by_text("I should keep it short.")).to_be_visible()


async def test_scripts_and_event_handlers_in_an_answer_do_nothing(signed_in: Page) -> None:
    await ask(signed_in, "hostile")
    await expect(signed_in.get_by_test_id("answer-footer")).to_be_visible()
    answer = answers(signed_in)
    await expect(answer).to_contain_text("After.")
    for link in await answer.locator(".md a[href]").all():
        await expect(link).to_have_attribute("href", re.compile("^https://"))
    assert await answer.locator("script, img, svg:not([aria-hidden]), iframe").count() == 0
    assert await signed_in.evaluate("window.hacked") is None


async def test_a_reload_in_the_middle_leaves_the_text_and_no_cursor(signed_in: Page) -> None:
    await ask(signed_in, "slow")
    # The text is written to the database every second and a half.
    await expect(answers(signed_in)).to_contain_text("whoever asked")
    address = signed_in.url
    await signed_in.reload()
    assert signed_in.url == address
    await expect(answers(signed_in)).to_contain_text("The mesh keeps one sequence")
    await expect(signed_in.get_by_test_id("ending")).to_contain_text("Interrupted")
    await expect(answers(signed_in)).not_to_contain_text("▍")
    await expect(signed_in.get_by_test_id("stop")).to_have_count(0)


async def test_an_answer_goes_on_while_another_tab_is_looked_at(signed_in: Page) -> None:
    await ask(signed_in, "slow")
    await expect(answers(signed_in)).to_contain_text("The mesh")
    before = len(await answers(signed_in).inner_text())
    await signed_in.get_by_role("link", name="Console").click()
    await asyncio.sleep(1.0)
    await signed_in.go_back()
    await expect(answers(signed_in)).to_contain_text("▍")
    assert len(await answers(signed_in).inner_text()) > before + 40
    await signed_in.keyboard.press("Escape")


async def test_edit_makes_a_branch_and_both_stay(signed_in: Page) -> None:
    await ask(signed_in, "first question")
    await finished(signed_in)
    await signed_in.get_by_role("button", name="Edit and branch").click()
    await signed_in.get_by_label("Edit the message").fill("second undone")
    await signed_in.get_by_role("button", name="Send as new version").click()
    await expect(answers(signed_in)).to_contain_text("Whole, though")
    await finished(signed_in)
    question = signed_in.locator("article[data-role=user]")
    await expect(question).to_contain_text("second undone")
    await question.get_by_role("button", name="Previous version").click()
    await expect(question).to_contain_text("first question")
    await expect(answers(signed_in)).to_contain_text("A route is a list of")
    await signed_in.reload()
    await expect(question).to_contain_text("first question")
    await expect(question.get_by_text("1/2")).to_be_visible()


async def test_regenerate_adds_a_version(signed_in: Page) -> None:
    await ask(signed_in, "undone")
    await finished(signed_in)
    await signed_in.get_by_role("button", name="Regenerate").click()
    await expect(answers(signed_in).get_by_text("2/2")).to_be_visible()
    await expect(answers(signed_in)).to_have_count(1)


async def test_copy(signed_in: Page) -> None:
    await signed_in.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await ask(signed_in, "copy me")
    await finished(signed_in)
    await answers(signed_in).get_by_role("button", name="Copy the message").click()
    assert (await signed_in.evaluate("navigator.clipboard.readText()")).startswith(
        "A route is a list of **stages**"
    )
    await answers(signed_in).locator(".code").get_by_role("button", name="Copy").click()
    code = await signed_in.evaluate("navigator.clipboard.readText()")
    assert code.startswith("def hops(route: list[Stage]) -> int:\n")


async def test_conversations_are_listed_renamed_searched_exported_and_deleted(
    signed_in: Page, tmp_path: Path
) -> None:
    for text in ("About lighthouses undone", "About bridges undone"):
        await ask(signed_in, text)
        await finished(signed_in)
        await signed_in.get_by_role("link", name="New chat").click()
        await expect(signed_in.get_by_role("heading", name="New chat")).to_be_visible()
    listed = signed_in.get_by_role("navigation", name="Conversations").get_by_role("link")
    await expect(listed).to_have_text(["About bridges undone", "About lighthouses undone"])

    await listed.nth(1).click()
    await signed_in.get_by_role("button", name="This conversation").click()
    await signed_in.get_by_role("menuitem", name="Rename").click()
    await signed_in.get_by_label("Title").fill("Towers by the sea")
    await signed_in.keyboard.press("Enter")
    await expect(listed.nth(1)).to_have_text("Towers by the sea")

    search = signed_in.get_by_label("Search conversations")
    await search.fill("LIGHTHOUSES")
    await expect(listed).to_have_text(["Towers by the sea"])
    await search.fill("")

    await signed_in.get_by_role("button", name="This conversation").click()
    async with signed_in.expect_download() as coming:
        await signed_in.get_by_role("menuitem", name="Export as Markdown").click()
    download = await coming.value
    assert download.suggested_filename == "towers-by-the-sea.md"
    await download.save_as(tmp_path / "chat.md")
    assert "About lighthouses undone" in (tmp_path / "chat.md").read_text()
    async with signed_in.expect_download() as coming:
        await signed_in.get_by_role("button", name="Export all conversations").click()
    await (await coming.value).save_as(tmp_path / "all.json")
    exported = json.loads((tmp_path / "all.json").read_text())
    assert {item["conversation"]["title"] for item in exported} == {
        "About bridges undone",
        "Towers by the sea",
    }
    assert all(len(item["messages"]) == 2 for item in exported)

    signed_in.once("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    await signed_in.get_by_role("button", name="This conversation").click()
    await signed_in.get_by_role("menuitem", name="Delete").click()
    await expect(listed).to_have_text(["About bridges undone"])
    await signed_in.reload()
    await expect(listed).to_have_text(["About bridges undone"])


async def test_system_prompt_and_parameters_belong_to_the_conversation(signed_in: Page) -> None:
    sent: list[dict[str, object]] = []
    signed_in.on(
        "request",
        lambda request: (
            sent.append(json.loads(request.post_data or "{}"))
            if request.url.endswith("/v1/chat/completions")
            else None
        ),
    )
    await signed_in.get_by_role("button", name="System prompt and parameters").click()
    await signed_in.get_by_label("System prompt", exact=True).fill("Be brief.")
    await signed_in.get_by_label("Temperature").fill("0.2")
    await signed_in.get_by_label("Longest answer").fill("64")
    await ask(signed_in, "undone")
    await finished(signed_in)
    assert sent[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "undone"},
    ]
    assert (sent[0]["temperature"], sent[0]["max_tokens"], sent[0]["stream"]) == (0.2, 64, True)
    assert "top_p" not in sent[0]
    await signed_in.get_by_role("link", name="New chat").click()
    await expect(signed_in.get_by_label("System prompt", exact=True)).to_have_value("")
    await ask(signed_in, "another undone")
    await finished(signed_in)
    assert "temperature" not in sent[1]


async def test_it_scrolls_along_only_near_the_end(signed_in: Page) -> None:
    await ask(signed_in, "long")
    box = signed_in.get_by_role("region", name="Conversation")
    distance = "box => box.scrollHeight - box.scrollTop - box.clientHeight"
    while await box.evaluate("box => box.scrollHeight") < 2000:
        await asyncio.sleep(0.1)
    assert await box.evaluate(distance) < 80
    await box.hover()
    await signed_in.mouse.wheel(0, -700)
    await asyncio.sleep(0.5)
    assert await box.evaluate(distance) > 400
    await signed_in.get_by_role("button", name="To the end").click()
    await asyncio.sleep(0.5)
    assert await box.evaluate(distance) < 80
    await signed_in.keyboard.press("Escape")
