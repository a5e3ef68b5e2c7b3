"""What trackers set live and keep in the books: no change of another tracker is lost, on both databases."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from books.kit import Kit

from meshnet.protocol.errors import ApiError
from meshnet.tracker.books import Books
from meshnet.tracker.forms import RoutingSettingsForm
from meshnet.tracker.tuning import Tuning
from meshnet.tracker.wishes import Wish, Wishes

EACH = 8


async def wishes_of(books: Books) -> Wishes:
    made = Wishes(books)
    await made.start()
    return made


async def test_two_trackers_that_set_things_at_once_lose_nothing(kit: Kit) -> None:
    books = [kit.books, await kit.another()]
    wishes = [await wishes_of(each) for each in books]
    tuning = [Tuning(each) for each in books]
    for kept in tuning:
        await kept.start()

    async def both(at: int, number: int) -> None:
        name = f"m{at}-{number}"
        await wishes[at].load(Wish(name, name, "0" * 64, number))
        await wishes[at].set_alias(f"a{at}-{number}", name)
        form = msgspec.convert({"models": {name: {"cost_model": "weighted"}}}, RoutingSettingsForm)
        await tuning[at].change(form, lambda model: model)

    try:
        await asyncio.gather(*(both(at, number) for at in range(2) for number in range(EACH)))
        names = {f"m{at}-{number}" for at in range(2) for number in range(EACH)}
        late = await wishes_of(books[0])
        await late.stop()
        assert set(late.kept.models) == set(late.kept.aliases.values()) == names
        assert set((await books[1].settings.get("routing"))["models"]) == names
        # Whoever was last has all of it in memory, too.
        await wishes[1].unload("m0-0")
        gone = msgspec.convert({"models": {"m0-0": None}}, RoutingSettingsForm)
        await tuning[1].change(gone, str)
        assert set(wishes[1].kept.models) == set(tuning[1].view()["models"]) == names - {"m0-0"}
    finally:
        for asked, routing in zip(wishes, tuning, strict=True):
            await asked.stop()
            await routing.stop()


async def test_what_cannot_be_read_is_not_written_over(kit: Kit) -> None:
    newer = {"models": {"m": {"model_id": 7}}, "default": "m"}
    await kit.books.settings.put("models", newer)
    routing = {"default": {"cost_model": "astrology"}}
    await kit.books.settings.put("routing", routing)
    wishes, tuning = await wishes_of(kit.books), Tuning(kit.books)
    await tuning.start()
    try:
        with pytest.raises(
            ApiError, match=r"models asked for.*cannot be read \(Expected `str`.*restore a backup"
        ):
            await wishes.set_default("other")
        with pytest.raises(ApiError, match=r"routing settings.*astrology.*left as they are"):
            await tuning.change(msgspec.convert({"default": {}}, RoutingSettingsForm), str)
        assert await kit.books.settings.get("models") == newer
        assert await kit.books.settings.get("routing") == routing
        assert tuning.of("any").cost_model == "measured"
    finally:
        await wishes.stop()
        await tuning.stop()


async def test_a_change_that_fails_changes_nothing(kit: Kit) -> None:
    await kit.books.settings.put("count", 1)

    def fail(value: int) -> int:
        raise ApiError(400, f"{value} is enough")

    with pytest.raises(ApiError, match="1 is enough"):
        await kit.books.settings.change("count", fail)
    assert await kit.books.settings.change("count", lambda value: value + 1) == 2
    assert await kit.books.settings.change("new", lambda value: [value]) == [None]
    assert await (await kit.another()).settings.all() == {"count": 2, "new": [None]}
