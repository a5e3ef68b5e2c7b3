"""Keys, accounts, join tokens and settings, on both databases."""

from __future__ import annotations

import re

import pytest
from books.kit import START, Kit, usage

from meshnet.tracker.books import Books, BooksError, Reservation

DAY = 86_400_000


async def test_a_new_mesh_gets_an_account_and_secrets_that_are_shown_once(kit: Kit) -> None:
    assert await kit.books.bootstrap() is None
    assert re.fullmatch(r"mn-[A-Za-z0-9_-]{32,}", kit.secrets.admin_key)
    assert re.fullmatch(r"mn-[A-Za-z0-9_-]{32,}", kit.secrets.use_key)
    assert re.fullmatch(r"mj-[A-Za-z0-9_-]{32,}", kit.secrets.join_token)
    assert (kit.admin.scope, kit.key.scope) == ("admin", "use")
    assert kit.key.account == "home"
    assert (await kit.books.accounts.get("home")).unlimited


async def test_an_owner_without_the_keys_gets_further_ones(kit: Kit) -> None:
    further = await kit.books.bootstrap(renew=True)
    assert further is not None
    for secrets in (kit.secrets, further):
        admin = await kit.books.authenticate(secrets.admin_key)
        use = await kit.books.authenticate(secrets.use_key)
        assert admin is not None
        assert use is not None
        assert (admin.scope, use.scope, admin.account, use.account) == ("admin", "use", "home", "home")
        await kit.books.joins.admit(secrets.join_token, "node-1")
    assert len(await kit.books.accounts.list()) == 2


async def test_no_secret_is_stored(kit: Kit) -> None:
    for table in ("keys", "join_tokens"):
        for row in await kit.rows(f"SELECT * FROM {table}"):
            for secret in (kit.secrets.admin_key, kit.secrets.use_key, kit.secrets.join_token):
                assert secret[3:] not in repr(row)


async def test_a_key_that_is_wrong_revoked_or_expired_opens_nothing(kit: Kit) -> None:
    assert await kit.books.authenticate("mn-" + "x" * 32) is None
    assert await kit.books.authenticate("") is None
    key, secret = await kit.books.keys.create("home", "short", expires_at=START + 1_000)
    assert await kit.books.authenticate(secret) == key
    kit.clock.forward(s=1)
    assert await kit.books.authenticate(secret) is None
    key, secret = await kit.books.keys.create("home", "gone")
    assert await kit.books.authenticate(secret) == key
    await kit.books.keys.revoke(key.id)
    assert await kit.books.authenticate(secret) is None
    revoked_at = (await kit.books.keys.get(key.id)).revoked_at
    kit.clock.forward(s=5)
    assert (await kit.books.keys.revoke(key.id)).revoked_at == revoked_at


async def test_a_key_revoked_at_another_tracker_stops_here_within_two_seconds(kit: Kit) -> None:
    other = await kit.another()
    key, secret = await kit.books.keys.create("home", "shared")
    assert await other.authenticate(secret) is not None
    await kit.books.keys.revoke(key.id)
    kit.clock.forward(ms=1_500)
    assert await other.authenticate(secret) is None


async def test_answers_come_from_memory_while_nothing_changes(kit: Kit) -> None:
    reads = 0
    read = kit.books.storage.read

    async def counted(function):  # type: ignore[no-untyped-def]
        nonlocal reads
        reads += 1
        return await read(function)

    key = await kit.books.authenticate(kit.secrets.use_key)
    assert key is not None
    await kit.books.reserve("c0", key, "free", 1, 1)
    kit.books.storage.read = counted  # type: ignore[method-assign]
    for number in range(50):
        assert await kit.books.authenticate(kit.secrets.use_key) is key
        await kit.books.reserve(f"c{number + 1}", key, "free", 1, 1)
    kit.books.storage.read = read  # type: ignore[method-assign]
    # Only the housekeeping's polls, which run on real time.
    assert reads <= 5


async def test_last_use_is_written_down(kit: Kit) -> None:
    kit.clock.forward(s=7)
    await kit.books.authenticate(kit.secrets.use_key)
    await kit.books.keys.save_last_used()
    assert (await kit.books.keys.get(kit.key.id)).last_used_at == START + 7_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": " "}, "name ' '"),
        ({"scope": "root"}, "scope 'root'"),
        ({"monthly_budget": -1}, "monthly_budget is -1"),
        ({"expires_at": START}, "has passed"),
    ],
)
async def test_keys_that_are_refused(kit: Kit, values: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "k"} | values
    with pytest.raises(BooksError, match=message):
        await kit.books.keys.create("home", **arguments)  # type: ignore[arg-type]


async def test_a_key_of_an_unknown_account(kit: Kit) -> None:
    with pytest.raises(BooksError, match="no account named 'nobody'") as caught:
        await kit.books.keys.create("nobody", "k")
    assert caught.value.status == 404
    with pytest.raises(BooksError, match="no key with the id 99"):
        await kit.books.keys.revoke(99)
    with pytest.raises(BooksError, match="scope of a key cannot be changed"):
        await kit.books.keys.update(kit.key.id, {"scope": "admin"})


async def test_a_key_may_use_its_models_only(kit: Kit) -> None:
    key, _ = await kit.books.keys.create("home", "one model", models=["SmolLM2"])
    assert isinstance(await kit.books.reserve("c1", key, "smollm2", 1, 1), Reservation)
    refusal = await kit.refused("c2", key, "other", 1, 1)
    assert (refusal.code, refusal.status, refusal.param) == ("model_not_allowed", 403, "model")
    key = await kit.books.keys.update(key.id, {"models": None})
    assert isinstance(await kit.books.reserve("c3", key, "other", 1, 1), Reservation)


async def test_a_total_budget_counts_what_is_reserved_and_what_was_charged(kit: Kit) -> None:
    key, _ = await kit.books.keys.create("home", "k", total_budget=450)
    await kit.reserve("c1", key)
    await kit.reserve("c2", key)
    refusal = await kit.refused("c3", key, "paid", 100, 50)
    assert (refusal.code, refusal.status) == ("budget_exceeded", 429)
    assert "50 are left" in refusal.message
    await kit.books.settle("c1", usage(100, 10))
    await kit.books.release("c2", "no route")
    await kit.reserve("c4", key)
    assert (await kit.books.reports.standing(key, kit.clock())).spent_in_all == 320
    await kit.books.settle("c4", usage(100, 50))
    await kit.books.refund("c4", "bad")
    assert (await kit.books.reports.standing(key, kit.clock())).spent_in_all == 120


async def test_a_monthly_budget_is_new_with_the_month(kit: Kit) -> None:
    key, _ = await kit.books.keys.create("home", "k", monthly_budget=250)
    await kit.reserve("january", key)
    refusal = await kit.refused("c2", key, "paid", 100, 50)
    # From 2027-01-15T08:00Z to the first of February.
    assert refusal.retry_after == 16 * 86_400 + 16 * 3_600
    kit.clock.forward(s=refusal.retry_after)
    await kit.reserve("february", key)
    # January's call ends in February and still counts for January.
    await kit.books.settle("january", usage(100, 10))
    standing = await kit.books.reports.standing(key, kit.clock())
    assert (standing.spent_this_month, standing.spent_in_all) == (200, 320)


async def test_a_revoked_key_cannot_reserve(kit: Kit) -> None:
    key, _ = await kit.books.keys.create("home", "k")
    revoked = await kit.books.keys.revoke(key.id)
    assert (await kit.refused("c1", revoked, "free", 1, 1)).status == 401


async def test_accounts(kit: Kit) -> None:
    with pytest.raises(BooksError, match="'small' exists already"):
        await kit.books.accounts.create("small")
    with pytest.raises(BooksError, match="no slash"):
        await kit.books.accounts.create("a/b")
    assert [account.name for account in await kit.books.accounts.list()] == ["home", "small"]
    await kit.books.accounts.set_unlimited("small", True)
    await kit.reserve("c1", tokens=10_000)
    assert (await kit.books.accounts.get("small")).balance == 1_000 - 20_000
    await kit.books.accounts.set_unlimited("small", False)
    assert (await kit.refused("c2", kit.small, "paid", 1, 1)).code == "insufficient_quota"


async def test_a_join_token_lets_in_as_many_nodes_as_it_says(kit: Kit) -> None:
    token, secret = await kit.books.joins.create("two", max_uses=2)
    assert secret.startswith("mj-")
    assert token.expires_at == START + DAY
    for node in ("a", "b", "a"):
        await kit.books.joins.admit(secret, node)
    with pytest.raises(BooksError, match="2 of 2 nodes"):
        await kit.books.joins.admit(secret, "c")
    kit.clock.forward(s=DAY // 1000)
    assert (await kit.books.joins.admit(secret, "a")).uses == 2
    await kit.books.joins.revoke(token.id)
    with pytest.raises(BooksError, match="revoked"):
        await kit.books.joins.admit(secret, "a")


async def test_a_join_token_expires_for_new_nodes(kit: Kit) -> None:
    _, secret = await kit.books.joins.create("short", valid_ms=1_000)
    kit.clock.forward(s=1)
    with pytest.raises(BooksError, match="expired"):
        await kit.books.joins.admit(secret, "a")
    for _ in range(3):
        await kit.books.joins.admit(kit.secrets.join_token, "any")


async def test_a_join_token_of_another_mesh_is_worth_nothing(
    kit: Kit, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = await Books.open(tmp_path_factory.mktemp("other"), clock=kit.clock)
    try:
        assert other.mesh.id != kit.books.mesh.id
        with pytest.raises(BooksError, match=kit.books.mesh.id) as caught:
            await kit.books.joins.admit((await other.joins.create("theirs"))[1], "a")
        assert caught.value.status == 403
    finally:
        await other.close()


async def test_all_trackers_share_one_mesh_and_its_secret(kit: Kit) -> None:
    other = await kit.another()
    assert other.mesh == kit.books.mesh
    assert len(kit.books.mesh.signing_secret) == 32
    assert kit.books.mesh.signing_secret.hex() not in repr(kit.books.mesh)


async def test_settings_are_kept_and_shared(kit: Kit) -> None:
    other = await kit.another()
    assert await kit.books.settings.get("weights", {"hop": 1.0}) == {"hop": 1.0}
    await kit.books.settings.put("weights", {"hop": 0.05, "names": ["é", None]})
    assert await kit.books.settings.get("weights") == {"hop": 0.05, "names": ["é", None]}
    kit.clock.forward(ms=1_500)
    assert await other.settings.get("weights") == {"hop": 0.05, "names": ["é", None]}
    await kit.books.settings.delete("weights")
    assert await kit.books.settings.all() == {}
    with pytest.raises(BooksError, match="setting 'big'"):
        await kit.books.settings.put("big", "x" * 2_000_000)
