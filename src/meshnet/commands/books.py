"""`meshnet account | key | price | ledger | data`: the books from the command line.

With `--tracker URL` they speak to a running tracker's management API, with the admin key from
MESHNET_API_KEY. Without, they open the tracker's own database (`--data DIR` or `--database URL`) and run the
same API in this process: whoever can read the database is its owner. That is safe while the tracker runs:
both databases take writers from several processes, every balance is decided within the transaction that
changes it, and the tracker notices changed keys, prices and settings within 2 seconds.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from meshnet.tracker.books.backup import Copied, backup, restore
from meshnet.tracker.books.client import Api, Failed
from meshnet.tracker.books.records import BooksError

account = typer.Typer(no_args_is_help=True)
key = typer.Typer(no_args_is_help=True)
price = typer.Typer(no_args_is_help=True)
ledger = typer.Typer(no_args_is_help=True)
data = typer.Typer(no_args_is_help=True)

T = TypeVar("T")
P = ParamSpec("P")

Tracker = Annotated[
    str, typer.Option("--tracker", help="URL of a running tracker; its admin key in MESHNET_API_KEY.")
]
Data = Annotated[Path | None, typer.Option("--data", help="The tracker's data directory.")]
Database = Annotated[str, typer.Option("--database", help="The tracker's database URL, instead of --data.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's answer as JSON.")]
Name = Annotated[str, typer.Argument(help="The account's name.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="A model the key may use; repeatable.")]
Expires = Annotated[str, typer.Option("--expires", help="A date (2027-01-31) or a time from now (90d, 12h).")]
Monthly = Annotated[str, typer.Option("--monthly-budget", help="Units per calendar month (UTC).")]
Total = Annotated[str, typer.Option("--total-budget", help="Units in all.")]
Requests = Annotated[int | None, typer.Option("--rpm", min=0, help="Requests per minute.")]
Tokens = Annotated[int | None, typer.Option("--tpm", min=0, help="Tokens per minute.")]

MICRO = 1_000_000


def command(app: typer.Typer, name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a subcommand whose failures end in one line on stderr and exit code 1."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except Failed as error:
                sys.stderr.write(f"meshnet: {error}\n")
                raise typer.Exit(1) from error

        app.command(name)(run)
        return run

    return register


# ---------------------------------------------------------------- values in and out


def micro(text: str, what: str) -> int:
    """`10.50` units as micro-units, exactly."""
    try:
        amount = Decimal(text) * MICRO
    except InvalidOperation as error:
        raise Failed(f"{what} is {text!r}; it is a number of units like 10 or 0.25") from error
    if not amount.is_finite() or amount != amount.to_integral_value():
        raise Failed(f"{what} is {text!r}; it has at most 6 decimal places")
    return int(amount)


def units(amount: int | None) -> str:
    """Micro-units as units, without trailing zeros; `-` for no limit."""
    return "-" if amount is None else f"{Decimal(amount) / MICRO:f}"


def when(text: str) -> int | None:
    """`90d`, `12h` or a date (UTC) as unix ms; None for an empty text."""
    if not text:
        return None
    spans = {"d": 86_400_000, "h": 3_600_000, "m": 60_000}
    if text[-1] in spans and text[:-1].isdigit():
        return time.time_ns() // 1_000_000 + int(text[:-1]) * spans[text[-1]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise Failed(f"{text!r} is neither a date like 2027-01-31 nor a time from now like 90d") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def date(at: int | None) -> str:
    """A time as a date and minute, UTC."""
    return "-" if at is None else datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def show(answer: Any, as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints the API's answer, as it is or as a table."""
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(highlight=False, markup=False).print(table)


# ---------------------------------------------------------------- accounts

ACCOUNT_COLUMNS = ("id", "account", "free", "held", "limit")


def _account_row(found: Mapping[str, Any]) -> tuple[object, ...]:
    limit = "none" if found["unlimited"] else "its balance"
    return found["id"], found["name"], units(found["balance"]), units(found["held"]), limit


@command(account, "list")
def account_list(
    tracker: Tracker = "", data: Data = None, database: Database = "", as_json: AsJson = False
) -> None:
    """List accounts with their balances (in units)."""
    answer = Api(tracker, data, database).call("GET", "/api/accounts")
    show(answer, as_json, ACCOUNT_COLUMNS, [_account_row(found) for found in answer["accounts"]])


@command(account, "show")
def account_show(
    name: Name, tracker: Tracker = "", data: Data = None, database: Database = "", as_json: AsJson = False
) -> None:
    """Show one account."""
    found = Api(tracker, data, database).call("GET", f"/api/accounts/{quote(name, safe='')}")
    show(found, as_json, ACCOUNT_COLUMNS, [_account_row(found)])


@command(account, "create")
def account_create(
    name: Name,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="May spend without a balance.")] = False,
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Open an account with nothing in it."""
    body = {"name": name, "unlimited": unlimited}
    found = Api(tracker, data, database).call("POST", "/api/accounts", body)
    show(found, as_json, ACCOUNT_COLUMNS, [_account_row(found)])


@command(account, "deposit")
def account_deposit(
    name: Name,
    amount: Annotated[str, typer.Argument(help="Units, as 10 or 0.25; negative (after --) takes out.")],
    why: Annotated[str, typer.Option("--why", help="Kept with the entry.")] = "",
    reference: Annotated[
        str, typer.Option("--reference", help="Makes it happen once, however often it is sent.")
    ] = "",
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Put units into an account."""
    body = {"amount": micro(amount, "AMOUNT"), "why": why or None, "reference": reference or None}
    path = f"/api/accounts/{quote(name, safe='')}/deposits"
    found = Api(tracker, data, database).call("POST", path, body)
    show(found, as_json, ACCOUNT_COLUMNS, [_account_row(found)])


@command(account, "limit")
def account_limit(
    name: Name,
    unlimited: Annotated[bool, typer.Option("--unlimited/--limited", help="Without or with a limit.")],
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Let an account spend without limit, or only its balance."""
    path = f"/api/accounts/{quote(name, safe='')}"
    found = Api(tracker, data, database).call("PATCH", path, {"unlimited": unlimited})
    show(found, as_json, ACCOUNT_COLUMNS, [_account_row(found)])


# ---------------------------------------------------------------- keys

KEY_COLUMNS = (
    "id",
    "key",
    "account",
    "scope",
    "per month",
    "in all",
    "rpm",
    "tpm",
    "models",
    "until",
    "used",
)


def _key_row(found: Mapping[str, Any]) -> tuple[object, ...]:
    until = "revoked" if found["revoked_at"] is not None else date(found["expires_at"])
    rates = (found["requests_per_minute"], found["tokens_per_minute"])
    return (
        found["id"],
        found["name"],
        found["account"],
        found["scope"],
        units(found["monthly_budget"]),
        units(found["total_budget"]),
        *("-" if rate is None else rate for rate in rates),
        "all" if found["models"] is None else ", ".join(found["models"]),
        until,
        date(found["last_used_at"]),
    )


def _limits(monthly: str, total: str, rpm: int | None, tpm: int | None) -> dict[str, int]:
    limits = {
        "monthly_budget": micro(monthly, "--monthly-budget") if monthly else None,
        "total_budget": micro(total, "--total-budget") if total else None,
        "requests_per_minute": rpm,
        "tokens_per_minute": tpm,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


@command(key, "list")
def key_list(
    of: Annotated[str, typer.Option("--account", help="Only the keys of this account.")] = "",
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """List keys; their secrets are nowhere to be seen."""
    answer = Api(tracker, data, database).call("GET", "/api/keys", query={"account": of or None})
    show(answer, as_json, KEY_COLUMNS, [_key_row(found) for found in answer["keys"]])


@command(key, "create")
def key_create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    of: Annotated[str, typer.Option("--account", help="The account that pays.")] = "home",
    scope: Annotated[str, typer.Option("--scope", help="use, or admin (which includes use).")] = "use",
    models: Models = None,
    expires: Expires = "",
    monthly: Monthly = "",
    total: Total = "",
    rpm: Requests = None,
    tpm: Tokens = None,
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and print its secret, once."""
    body = {"account": of, "name": name, "scope": scope, **_limits(monthly, total, rpm, tpm)}
    body |= {"models": models or None, "expires_at": when(expires)}
    answer = Api(tracker, data, database).call("POST", "/api/keys", body)
    if not as_json:
        sys.stderr.write("This is shown once; it cannot be read again:\n")
        sys.stdout.write(f"{answer['secret']}\n")
        return
    show(answer, as_json, (), ())


@command(key, "update")
def key_update(
    key_id: Annotated[int, typer.Argument(help="The key's id, as `meshnet key list` shows it.")],
    name: Annotated[str, typer.Option("--name", help="A new name.")] = "",
    models: Models = None,
    expires: Expires = "",
    monthly: Monthly = "",
    total: Total = "",
    rpm: Requests = None,
    tpm: Tokens = None,
    lift: Annotated[
        list[str] | None,
        typer.Option("--no", help="Lifts a limit: monthly-budget, total-budget, rpm, tpm, models, expires."),
    ] = None,
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Change a key's name, models, expiry or limits."""
    fields = {
        "monthly-budget": "monthly_budget",
        "total-budget": "total_budget",
        "rpm": "requests_per_minute",
        "tpm": "tokens_per_minute",
        "models": "models",
        "expires": "expires_at",
    }
    body: dict[str, Any] = {}
    for limit in lift or []:
        if limit not in fields:
            raise Failed(f"--no {limit} is not one of {', '.join(fields)}")
        body[fields[limit]] = None
    body |= _limits(monthly, total, rpm, tpm)
    body |= {"name": name} if name else {}
    body |= {"models": models} if models else {}
    body |= {"expires_at": when(expires)} if expires else {}
    found = Api(tracker, data, database).call("PATCH", f"/api/keys/{key_id}", body)
    show(found, as_json, KEY_COLUMNS, [_key_row(found)])


@command(key, "revoke")
def key_revoke(
    key_id: Annotated[int, typer.Argument(help="The key's id, as `meshnet key list` shows it.")],
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """End a key for ever."""
    found = Api(tracker, data, database).call("DELETE", f"/api/keys/{key_id}")
    show(found, as_json, KEY_COLUMNS, [_key_row(found)])


# ---------------------------------------------------------------- prices

PRICE_COLUMNS = ("model", "input / 1M tokens", "output / 1M tokens", "from")


def _price_row(found: Mapping[str, Any]) -> tuple[object, ...]:
    return found["model"], units(found["input"]), units(found["output"]), date(found["valid_from"])


@command(price, "list")
def price_list(
    tracker: Tracker = "", data: Data = None, database: Database = "", as_json: AsJson = False
) -> None:
    """List all prices, in units per million tokens. A model that is not listed is free."""
    answer = Api(tracker, data, database).call("GET", "/api/prices")
    show(answer, as_json, PRICE_COLUMNS, [_price_row(found) for found in answer["prices"]])


@command(price, "set")
def price_set(
    model: Annotated[str, typer.Argument(help="Model id; '*' is for all without a price of their own.")],
    input_price: Annotated[str, typer.Option("--input", help="Units per million prompt tokens.")],
    output_price: Annotated[str, typer.Option("--output", help="Units per million output tokens.")],
    valid_from: Annotated[str, typer.Option("--from", help="A date or a time from now; else now.")] = "",
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Set a model's price for calls accepted from then on."""
    body = {
        "model": model,
        "input": micro(input_price, "--input"),
        "output": micro(output_price, "--output"),
        "valid_from": when(valid_from),
    }
    found = Api(tracker, data, database).call("POST", "/api/prices", body)
    show(found, as_json, PRICE_COLUMNS, [_price_row(found)])


# ---------------------------------------------------------------- the ledger


@command(ledger, "check")
def ledger_check(
    tracker: Tracker = "", data: Data = None, database: Database = "", as_json: AsJson = False
) -> None:
    """Prove that every balance is the sum of its entries and each call is booked once. Exit code 1 if not."""
    report = Api(tracker, data, database).call("GET", "/api/ledger/check")
    if as_json:
        show(report, True, (), ())
    else:
        sys.stdout.write(f"{report['calls']} calls, {report['entries']} entries: ")
        sys.stdout.write("all balances and calls check out\n" if report["ok"] else "problems:\n")
        for problem in report["problems"]:
            sys.stdout.write(f"  {problem}\n")
    if not report["ok"]:
        raise typer.Exit(1)


@command(ledger, "refund")
def ledger_refund(
    call_id: Annotated[str, typer.Argument(help="The call's id.")],
    why: Annotated[str, typer.Option("--why", help="Kept with the entries.")],
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Give a call's charge back, from those who earned it."""
    body = {"call_id": call_id, "why": why}
    found = Api(tracker, data, database).call("POST", "/api/ledger/refund", body)
    show(found, as_json, ("call", "status", "charge"), [(call_id, found["status"], units(found["charge"]))])


@command(ledger, "export")
def ledger_export(
    csv: Annotated[bool, typer.Option("--csv", help="As CSV, which is the one format there is.")] = True,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file; else stdout.")] = None,
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
) -> None:
    """Write all entries, oldest first, in micro-units and unix milliseconds."""
    api = Api(tracker, data, database)
    if output is None:
        api.stream("GET", "/api/ledger/export", lambda piece: sys.stdout.write(piece.decode()))
        return
    try:
        with output.open("xb") as file:
            api.stream("GET", "/api/ledger/export", file.write)
    except OSError as error:
        raise Failed(f"{output} cannot be written: {error.strerror}") from error


@command(ledger, "call")
def ledger_call(
    call_id: Annotated[str, typer.Argument(help="The call's id.")],
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Show a call's charge and entries."""
    found = Api(tracker, data, database).call("GET", f"/api/calls/{quote(call_id, safe='')}/ledger")
    if not as_json:
        sys.stdout.write(
            f"{found['model']}: {found['status']}, {found['prompt_tokens']} tokens in, "
            f"{found['output_tokens']} out, reserved {units(found['reserved'])}, "
            f"charged {units(found['charge'])} to {found['account']}\n"
        )
    rows = [
        (date(e["at"]), e["kind"], e["part"], e["source"], e["target"], units(e["amount"]), e["why"] or "")
        for e in found["entries"]
    ]
    show(found, as_json, ("at", "kind", "part", "from", "to", "units", "why"), rows)


SPENDING_FIELDS = ("day", "account", "key", "calls", "prompt_tokens", "output_tokens")


@command(ledger, "spending")
def ledger_spending(
    days: Annotated[int, typer.Option("--days", min=1, help="Days (UTC), today included.")] = 30,
    of: Annotated[str, typer.Option("--account", help="Only this account.")] = "",
    key_id: Annotated[int | None, typer.Option("--key", help="Only the key with this id.")] = None,
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Show what was charged per day, account and key."""
    query = {"days": days, "account": of or None, "key": key_id}
    answer = Api(tracker, data, database).call("GET", "/api/spending", query=query)
    columns = ("day", "account", "key", "calls", "tokens in", "tokens out", "units")
    rows = [
        (
            s["day"],
            s["account"],
            s["key"],
            s["calls"],
            s["prompt_tokens"],
            s["output_tokens"],
            units(s["charge"]),
        )
        for s in answer["spending"]
    ]
    show(answer, as_json, columns, rows)


@command(ledger, "earnings")
def ledger_earnings(
    tracker: Tracker = "", data: Data = None, database: Database = "", as_json: AsJson = False
) -> None:
    """Show what each node did (layers x tokens) and earned."""
    answer = Api(tracker, data, database).call("GET", "/api/earnings")
    rows = [
        (n["node_id"], n["calls"], n["prefill_units"], n["decode_units"], units(n["earned"]))
        for n in answer["nodes"]
    ]
    show(answer, as_json, ("node", "calls", "prefill", "decode", "units"), rows)


@command(ledger, "rules")
def ledger_rules(
    mesh_share: Annotated[float | None, typer.Option(help="Percent of each charge, for the mesh.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Shorter answers of pipelines are suspect.")] = None,
    check_minutes: Annotated[float | None, typer.Option(help="The longest wait for a check.")] = None,
    audit: Annotated[float | None, typer.Option(help="Percent of calls that are checked.")] = None,
    max_gap: Annotated[float | None, typer.Option(help="Allowed distance to the greatest logit.")] = None,
    tracker: Tracker = "",
    data: Data = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Show the mesh's share and the billing guard's thresholds, or change those that are given."""
    given = {
        "min_tokens": min_tokens,
        "check_ms": None if check_minutes is None else round(check_minutes * 60_000),
        "audit_ppm": None if audit is None else round(audit * 10_000),
        "max_gap": max_gap,
    }
    guard = {name: value for name, value in given.items() if value is not None}
    body: dict[str, Any] = {"guard": guard} if guard else {}
    body |= {} if mesh_share is None else {"mesh_share": round(mesh_share * 100)}
    api = Api(tracker, data, database)
    found = api.call("PUT" if body else "GET", "/api/settings/books", body or None)
    rows = [("mesh_share", found["mesh_share"]), *found["guard"].items()]
    show(found, as_json, ("rule", "value"), rows)


# ---------------------------------------------------------------- the data


def _run(work: Awaitable[T]) -> T:
    async def run() -> T:
        return await work

    try:
        return asyncio.run(run())
    except BooksError as error:
        raise Failed(error.message) from error
    except OSError as error:
        raise Failed(str(error)) from error


def _proof(copied: Copied) -> str:
    if copied.report is None:
        return f"schema {copied.revision}, which is older than this version; checked when it is restored"
    return f"{copied.report.calls} calls, {copied.report.entries} entries, all check out"


@command(data, "backup")
def data_backup(
    file: Annotated[Path, typer.Argument(help="A new file.")], data: Data = None, database: Database = ""
) -> None:
    """Write all of the books into one file, also while the tracker runs. Keep it safe: it holds secrets."""
    copied = _run(backup(Api("", data, database).where, file))
    sys.stdout.write(f"{file}: {_proof(copied)}\n")


@command(data, "restore")
def data_restore(
    file: Annotated[Path, typer.Argument(help="A file that `meshnet data backup` wrote.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Set the books that are there aside, under another name.")
    ] = False,
    data: Data = None,
    database: Database = "",
) -> None:
    """Fill the books from a backup. The tracker must be stopped."""
    copied = _run(restore(file, Api("", data, database).where, replace=replace))
    sys.stdout.write(f"restored: {_proof(copied)}\n")


@command(data, "admin-key")
def data_admin_key(
    revoke_others: Annotated[
        bool, typer.Option("--revoke-others", help="Revoke all other admin keys as well.")
    ] = False,
    data: Data = None,
    database: Database = "",
) -> None:
    """Make a new admin key when all others are lost. Whoever can open the database may do this."""
    api = Api("", data, database)
    keys = api.call("GET", "/api/keys")["keys"]
    accounts = api.call("GET", "/api/accounts")["accounts"]
    if not accounts:
        raise Failed("there are no accounts yet; start the tracker once: it makes the first keys")
    body = {"account": accounts[0]["name"], "name": "recovered admin key", "scope": "admin"}
    made = api.call("POST", "/api/keys", body)
    if revoke_others:
        for other in keys:
            if other["scope"] == "admin" and other["revoked_at"] is None:
                api.call("DELETE", f"/api/keys/{other['id']}")
    sys.stderr.write("This is shown once; it cannot be read again:\n")
    sys.stdout.write(f"{made['secret']}\n")
