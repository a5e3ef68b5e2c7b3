"""The commands, against a database of their own, beside a running tracker, and over HTTP."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from books.kit import Kit, usage
from books.postgres import Postgres
from books.test_api import Served, served  # noqa: F401
from typer.testing import CliRunner, Result

from meshnet.cli import build_app
from meshnet.tracker.books import Books, BooksError
from meshnet.tracker.books.backup import backup, restore, tracker_runs
from meshnet.tracker.books.storage import wall_clock


def meshnet(*arguments: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(build_app(arguments[0]), list(arguments))


async def off(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a command beside the loop: it has a loop of its own."""
    return await asyncio.to_thread(function, *arguments)


@pytest.fixture
async def place(where: str) -> str:
    """Books of a tracker that has been started once and stopped."""
    async with await Books.open(where) as books:
        assert await books.bootstrap() is not None
    return where


def at(place: str) -> list[str]:
    return ["--database", place] if "://" in place else ["--data", place]


async def test_accounts_keys_and_prices_without_a_tracker(place: str) -> None:
    def run(*arguments: str) -> str:
        result = meshnet(*arguments, *at(place))
        assert result.exit_code == 0, result.output
        return result.stdout

    def script() -> str:
        run("account", "create", "bob")
        run("account", "deposit", "bob", "10.50", "--why", "cash", "--reference", "r1")
        run("account", "deposit", "bob", "10.50", "--why", "cash", "--reference", "r1")
        assert "10.5" in run("account", "show", "bob")
        assert "none" in run("account", "limit", "bob", "--unlimited")
        secret = run(
            "key",
            "create",
            "laptop",
            "--account",
            "bob",
            "--monthly-budget",
            "3",
            "--rpm",
            "60",
            "--model",
            "smollm2",
            "--expires",
            "90d",
        ).strip()
        made = json.loads(run("key", "list", "--account", "bob", "--json"))["keys"]
        assert [
            (key["name"], key["monthly_budget"], key["requests_per_minute"], key["models"]) for key in made
        ] == [("laptop", 3_000_000, 60, ["smollm2"])]
        assert made[0]["expires_at"] > wall_clock() + 89 * 86_400_000
        key_id = str(made[0]["id"])
        changed = json.loads(run("key", "update", key_id, "--no", "rpm", "--tpm", "500", "--json"))
        assert (changed["requests_per_minute"], changed["tokens_per_minute"]) == (None, 500)
        run("price", "set", "smollm2", "--input", "0.5", "--output", "1.5")
        (price,) = json.loads(run("price", "list", "--json"))["prices"]
        assert (price["model"], price["input"], price["output"]) == ("smollm2", 500_000, 1_500_000)
        for shown in (run("account", "list"), run("key", "list"), run("price", "list")):
            assert shown
        return secret

    secret = await off(script)
    async with await Books.open(place) as books:
        key = await books.authenticate(secret)
        assert key is not None
        assert key.account == "bob"
        assert (await books.accounts.get("bob")).balance == 10_500_000
        result = await off(meshnet, "key", "revoke", str(key.id), *at(place))
        assert result.exit_code == 0
        await books.watch.poll()
        assert await books.authenticate(secret) is None


async def test_rules_are_shown_and_changed(place: str) -> None:
    result = await off(
        meshnet,
        "ledger",
        "rules",
        "--mesh-share",
        "2.5",
        "--audit",
        "0.5",
        "--check-minutes",
        "30",
        *at(place),
    )
    assert result.exit_code == 0, result.output
    result = await off(meshnet, "ledger", "rules", "--json", *at(place))
    rules = json.loads(result.stdout)
    assert (rules["mesh_share"], rules["guard"]["audit_ppm"], rules["guard"]["check_ms"]) == (
        250,
        5_000,
        1_800_000,
    )
    result = await off(meshnet, "ledger", "rules", "--min-tokens", "65", *at(place))
    assert result.exit_code == 1
    assert "guard.min_tokens is 65" in result.stderr


async def test_the_ledger_while_the_tracker_runs(kit: Kit, tmp_path: Path) -> None:
    """The commands work on the database of a running tracker, and it sees what they did."""
    place = at(kit.where)
    await kit.reserve("c1")
    await kit.books.settle("c1", usage(100, 10))
    await kit.reserve("c2")

    result = await off(meshnet, "ledger", "check", "--json", *place)
    assert json.loads(result.stdout) == {"ok": True, "calls": 2, "entries": 8, "problems": []}
    result = await off(meshnet, "ledger", "refund", "c1", "--why", "garbled", *place)
    assert "refunded" in result.stdout
    assert (await kit.books.accounts.get("small")).balance == 800
    result = await off(meshnet, "ledger", "refund", "c2", "--why", "stuck", *place)
    assert "released" in result.stdout
    assert (await kit.books.settle("c2", usage(100, 10))).status == "released"
    result = await off(meshnet, "ledger", "call", "c1", *place)
    assert "refunded" in result.stdout
    for command in ("spending", "earnings"):
        assert (await off(meshnet, "ledger", command, *place)).exit_code == 0

    target = tmp_path / "ledger.csv"
    result = await off(meshnet, "ledger", "export", "--csv", "--output", str(target), *place)
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(await asyncio.to_thread(target.read_text))))
    assert len(rows) == (await kit.books.reports.check()).entries
    result = await off(meshnet, "ledger", "export", "--csv", "--output", str(target), *place)
    assert result.exit_code == 1
    result = await off(meshnet, "ledger", "export", "--csv", *place)
    assert len(result.stdout.splitlines()) == len(rows) + 1

    await kit.books.storage.write(
        lambda c: (
            c.exec_driver_sql("UPDATE balances SET amount = amount + 1 WHERE book = 'mesh'")
            and c.exec_driver_sql("UPDATE balances SET amount = amount + 1 WHERE book = 'outside'")
        )
    )
    result = await off(meshnet, "ledger", "check", *place)
    assert result.exit_code == 1
    assert "book outside" in result.stdout


async def test_commands_over_http(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    tracker = ["--tracker", served.base]
    result = await off(meshnet, "account", "list", *tracker)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "MESHNET_API_KEY is not set" in result.stderr
    monkeypatch.setenv("MESHNET_API_KEY", served.kit.secrets.use_key)
    result = await off(meshnet, "account", "list", *tracker)
    assert "no admin scope" in result.stderr
    monkeypatch.setenv("MESHNET_API_KEY", served.kit.secrets.admin_key)
    result = await off(meshnet, "account", "list", *tracker, "--json")
    assert [account["name"] for account in json.loads(result.stdout)["accounts"]] == ["home", "small"]
    result = await off(meshnet, "account", "deposit", "small", *tracker, "--", "-0.0005")
    assert result.exit_code == 0, result.output
    assert (await served.kit.books.accounts.get("small")).balance == 500
    result = await off(meshnet, "ledger", "export", *tracker)
    assert result.stdout.startswith("id,at,call_id")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["account", "deposit", "home", "ten"], "AMOUNT is 'ten'"),
        (["account", "deposit", "home", "0.0000001"], "at most 6 decimal places"),
        (["account", "deposit", "home", "NaN"], "at most 6 decimal places"),
        (["account", "show", "nobody"], "no account named 'nobody'"),
        (["key", "create", "k", "--expires", "tomorrow"], "'tomorrow' is neither a date"),
        (["key", "create", "k", "--expires", "2001-01-01"], "has passed"),
        (["key", "update", "1", "--no", "everything"], "--no everything"),
        (["ledger", "refund", "none", "--why", "x"], "know no call 'none'"),
        (["price", "set", "m", "--input", "-1", "--output", "0"], "input is -1000000"),
    ],
)
async def test_commands_that_fail(tmp_path: Path, arguments: list[str], message: str) -> None:
    async with await Books.open(tmp_path / "data") as books:
        await books.bootstrap()
    result = await off(meshnet, *arguments, "--data", str(tmp_path / "data"))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


async def test_commands_without_books(tmp_path: Path) -> None:
    for arguments in (["account", "list"], ["data", "backup", str(tmp_path / "b")], ["data", "admin-key"]):
        result = await off(meshnet, *arguments, "--data", str(tmp_path / "none"))
        assert result.exit_code == 1
        assert "there are no books at" in result.stderr
    assert not await asyncio.to_thread((tmp_path / "none").exists)
    result = await off(meshnet, "account", "list", "--tracker", "http://127.0.0.1:9", "--data", "x")
    assert "cannot be given together" in result.stderr


async def test_an_unreachable_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_API_KEY", "mn-x")
    result = await off(meshnet, "account", "list", "--tracker", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr


async def test_a_lost_admin_key(place: str) -> None:
    result = await off(meshnet, "data", "admin-key", "--revoke-others", *at(place))
    assert result.exit_code == 0
    async with await Books.open(place) as books:
        key = await books.authenticate(result.stdout.strip())
        assert key is not None
        assert (key.scope, key.name) == ("admin", "recovered admin key")
        others = [other for other in await books.keys.list() if other.scope == "admin" and other.id != key.id]
        assert all(other.revoked_at is not None for other in others)
        assert all(k.revoked_at is None for k in await books.keys.list() if k.scope == "use")


# ---------------------------------------------------------------- backup and restore


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


async def prepared(kit: Kit) -> None:
    """Books with a settled call, one in flight, and settings."""
    await kit.books.settings.put("mesh_share", 1_000)
    await kit.reserve("done")
    await kit.books.settle("done", usage(100, 10))
    await kit.reserve("open")


async def unchanged(kit: Kit, place: str) -> None:
    """What a restored place must have of the kit's books."""
    async with await Books.open(place, clock=kit.clock) as books:
        assert books.mesh == kit.books.mesh
        assert await books.authenticate(kit.secrets.use_key) is not None
        assert (await books.reports.call("done")).charge == 120
        assert await books.settings.get("mesh_share") == 1_000
        assert (await books.joins.admit(kit.secrets.join_token, "n")).name == "first join token"
        await books.start("http://restored")
        await books.recover()
        assert (await books.accounts.get("small")).held == 0
        assert (await books.accounts.get("small")).balance == 880
        assert (await books.accounts.create("next")).id > 2
        await books.accounts.deposit("next", 5)
        assert (await books.reports.check()).problems == ()


async def test_a_backup_of_a_running_tracker_is_the_whole_of_its_books(
    kit: Kit, tmp_path: Path, postgres: Postgres
) -> None:
    await prepared(kit)
    file = tmp_path / "backup.db"
    copied = await backup(kit.where, file)
    assert copied.report is not None
    assert (copied.report.ok, copied.report.calls) == (True, 2)
    assert [name for name in names(tmp_path) if name != "data"] == ["backup.db"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await kit.reserve("later")
    for target in (str(tmp_path / "restored"), await postgres.new_database(empty=True)):
        await restore(file, target)
        await unchanged(kit, target)
        with pytest.raises(BooksError, match="books"):
            await restore(file, target)
    assert (await kit.books.accounts.get("small")).held == 400


async def test_restoring_over_books_sets_them_aside(tmp_path: Path) -> None:
    kit = await Kit.make(str(tmp_path / "data"))
    await prepared(kit)
    file = tmp_path / "backup.db"
    await backup(kit.where, file)
    await kit.books.accounts.deposit("small", 99)
    assert kit.books._housekeeping is not None
    running = asyncio.create_task(beat(kit))
    with pytest.raises(BooksError, match="a tracker is running"):
        await restore(file, kit.where, replace=True)
    running.cancel()
    await kit.close()
    assert not await tracker_runs(kit.where)
    await restore(file, kit.where, replace=True)
    await unchanged(kit, kit.where)
    assert names(tmp_path / "data") == ["meshnet.db", "meshnet.db.before-restore-1"]
    async with await Books.open(f"sqlite:///{tmp_path}/data/meshnet.db.before-restore-1") as books:
        assert (await books.accounts.get("small")).balance == 779


async def beat(kit: Kit) -> None:
    """The tracker's heart; the kit's clock stands, and with it the one of its housekeeping."""
    while True:
        await kit.books.trackers.beat()
        await asyncio.sleep(0.2)


async def test_a_backup_of_the_first_schema_is_upgraded_when_it_is_restored(tmp_path: Path) -> None:
    from books.test_storage import FIRST_SCHEMA
    from sqlalchemy import Connection, text

    from meshnet.tracker.books.migration import migrate
    from meshnet.tracker.books.storage import Storage

    def fill(connection: Connection) -> None:
        migrate(connection, "0001")
        for statement in FIRST_SCHEMA:
            words = {"true": "TRUE", "false": "FALSE", "hash": "x"}
            connection.execute(text(statement.format(**words).replace(":", r"\:")))

    storage = await Storage.open(tmp_path / "old", upgrade=False)
    await storage.write(fill)
    await storage.close()
    file = tmp_path / "old.db"
    copied = await backup(tmp_path / "old", file)
    assert (copied.revision, copied.report) == ("0001", None)
    restored = await restore(file, tmp_path / "new")
    assert restored.report is not None
    assert restored.report.calls == 2


async def test_files_that_are_no_backups(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"x" * 5_000)
    empty = tmp_path / "empty"
    empty.touch()
    for file, message in (
        (bad, "is not a backup"),
        (empty, "is not a backup"),
        (tmp_path / "none", "no file"),
    ):
        with pytest.raises(BooksError, match=message):
            await restore(file, tmp_path / "target")
    assert not (tmp_path / "target").exists()


async def test_a_backup_overwrites_nothing(kit: Kit, tmp_path: Path) -> None:
    file = tmp_path / "b.db"
    file.write_text("precious")
    with pytest.raises(BooksError, match="exists already"):
        await backup(kit.where, file)
    assert file.read_text() == "precious"


async def test_backup_and_restore_as_commands(place: str, tmp_path: Path) -> None:
    file = tmp_path / "b.db"
    result = await off(meshnet, "data", "backup", str(file), *at(place))
    assert (result.exit_code, "0 calls, 0 entries, all check out" in result.stdout) == (0, True)
    result = await off(meshnet, "data", "restore", str(file), *at(place))
    assert result.exit_code == 1
    assert "books" in result.stderr
    result = await off(meshnet, "data", "restore", str(file), "--data", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
