"""The management API of the books: accounts, keys, prices, ledger, spending, suspects, join tokens.

Plain Starlette routes. Middleware of the server must have put the caller's key into `request.state.key`;
every route wants the scope `admin`, but `GET /api/me`, which shows a key its own account. Errors have
OpenAI's shape. `OPERATIONS` describes every route for the OpenAPI document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from meshnet.tracker.books import forms
from meshnet.tracker.books.facade import MESH_SHARE, Books
from meshnet.tracker.books.guard import SETTING, GuardRules
from meshnet.tracker.books.records import BooksError, BooksUnavailable, KeyInfo
from meshnet.tracker.books.reports import DAY_MS

F = TypeVar("F", bound=forms.Form)
Q = TypeVar("Q", bound=forms.Query)
Handler = Callable[[Books, Request], Awaitable[Response]]

MAX_BODY_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: `body` and `query` are the pydantic models of what it takes, `status` that of a success."""

    method: str
    path: str
    summary: str
    handler: Handler
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    status: int = 200
    scope: str = "admin"


def routes(books: Books) -> list[Route]:
    """The routes, bound to `books`."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    return [Route(path, _endpoint(books, found), methods=list(found)) for path, found in by_path.items()]


def _endpoint(books: Books, operations: Mapping[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        operation = operations["GET" if request.method == "HEAD" else request.method]
        key: KeyInfo | None = getattr(request.state, "key", None)
        if key is None:
            return error(401, "give an API key as 'Authorization: Bearer mn-...'", "invalid_api_key")
        if operation.scope == "admin" and key.scope != "admin":
            return error(403, f"key {key.name!r} has no admin scope, which this needs", "admin_key_needed")
        try:
            return await operation.handler(books, request)
        except BooksUnavailable as unavailable:
            response = error(503, unavailable.message, unavailable.code)
            response.headers["retry-after"] = str(unavailable.retry_after)
            return response
        except BooksError as refused:
            return error(refused.status, refused.message, refused.code, refused.param)
        except ValidationError as invalid:
            return _invalid(invalid)

    return endpoint


def error(status: int, message: str, code: str, param: str | None = None) -> Response:
    """An error in OpenAI's shape."""
    kind = "authentication_error" if status == 401 else "permission_error" if status == 403 else None
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    body = {"error": {"message": message, "type": kind, "code": code, "param": param}}
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _invalid(invalid: ValidationError) -> Response:
    first = invalid.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    shown = repr(first["input"])[:100] if first["type"] != "missing" else "missing"
    return error(400, f"{param or 'the body'} is {shown}: {first['msg']}", "invalid_value", param)


def _answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _form(request: Request, model: type[F]) -> F:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BooksError(
            f"content-type is {kind!r}; send application/json", code="bad_content_type", status=415
        )
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BooksError(f"the body has more than {MAX_BODY_BYTES} bytes", code="too_large", status=413)
    return model.model_validate_json(body)


def _query(request: Request, model: type[Q]) -> Q:
    given = request.query_params
    for name in given:
        if len(given.getlist(name)) > 1:
            raise BooksError(f"{name} is given twice", code="invalid_value", param=name)
    return model.model_validate(dict(given))


def _number(request: Request, name: str) -> int:
    value = request.path_params[name]
    if not value.isascii() or not value.isdigit() or int(value[:20]) > forms.MAX_ID:
        raise BooksError(f"{name} is {value!r}; it is a number", code="not_found", status=404, param=name)
    return int(value)


def _word(request: Request, name: str) -> str:
    value: str = request.path_params[name]
    if "\0" in value:
        raise BooksError(f"{name} {value!r} does not exist", code="not_found", status=404, param=name)
    return value


# ---------------------------------------------------------------- accounts


async def list_accounts(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    return _answer({"accounts": await books.accounts.list()})


async def create_account(books: Books, request: Request) -> Response:
    form = await _form(request, forms.NewAccount)
    return _answer(await books.accounts.create(form.name, unlimited=form.unlimited), 201)


async def get_account(books: Books, request: Request) -> Response:
    return _answer(await books.accounts.get(_word(request, "name")))


async def change_account(books: Books, request: Request) -> Response:
    form = await _form(request, forms.AccountChange)
    return _answer(await books.accounts.set_unlimited(_word(request, "name"), form.unlimited))


async def deposit(books: Books, request: Request) -> Response:
    form = await _form(request, forms.Deposit)
    account = await books.accounts.deposit(
        _word(request, "name"), form.amount, why=form.why, reference=form.reference
    )
    return _answer(account)


# ---------------------------------------------------------------- keys


async def list_keys(books: Books, request: Request) -> Response:
    query = _query(request, forms.KeysQuery)
    return _answer({"keys": await books.keys.list(query.account)})


async def create_key(books: Books, request: Request) -> Response:
    form = await _form(request, forms.NewKey)
    key, secret = await books.keys.create(**form.model_dump())
    return _answer({"key": key, "secret": secret}, 201)


async def get_key(books: Books, request: Request) -> Response:
    return _answer(await books.keys.get(_number(request, "key_id")))


async def change_key(books: Books, request: Request) -> Response:
    form = await _form(request, forms.KeyChange)
    changes = form.model_dump(exclude_unset=True)
    return _answer(await books.keys.update(_number(request, "key_id"), changes))


async def revoke_key(books: Books, request: Request) -> Response:
    return _answer(await books.keys.revoke(_number(request, "key_id")))


async def me(books: Books, request: Request) -> Response:
    query = _query(request, forms.SpendingQuery)
    key: KeyInfo = request.state.key
    now = books.clock()
    standing = await books.reports.standing(key, now)
    since = (now // DAY_MS - query.days + 1) * DAY_MS
    spending = await books.reports.spending(since=since, until=now + 1, account=key.account)
    return _answer({**dataclasses.asdict(standing), "spending": spending})


# ---------------------------------------------------------------- prices


async def list_prices(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    await books.watch.ensure()
    return _answer({"prices": (await books.prices.current()).all()})


async def set_price(books: Books, request: Request) -> Response:
    form = await _form(request, forms.NewPrice)
    return _answer(await books.prices.set(form.model, form.input, form.output, form.valid_from), 201)


# ---------------------------------------------------------------- ledger


async def list_entries(books: Books, request: Request) -> Response:
    query = _query(request, forms.LedgerQuery)
    account_id = None if query.account is None else (await books.accounts.get(query.account)).id
    page = await books.reports.entries(
        after=query.after, limit=query.limit, account_id=account_id, call_id=query.call
    )
    more = len(page) == query.limit
    return _answer({"entries": page, "next_after": page[-1].id if more else None})


async def export_entries(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    await books.flush()
    return StreamingResponse(
        books.reports.export_csv(),
        media_type="text/csv",
        headers={"content-disposition": 'attachment; filename="meshnet-ledger.csv"'},
    )


async def check_ledger(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    await books.flush()
    report = await books.reports.check()
    return _answer({"ok": report.ok, **dataclasses.asdict(report)})


async def refund_call(books: Books, request: Request) -> Response:
    form = await _form(request, forms.RefundOrder)
    settlement = await books.refund(form.call_id, form.why)
    if settlement.repeated and settlement.status == "settled":
        raise BooksError(
            f"call {form.call_id!r} was not charged; there is nothing to refund",
            code="nothing_charged",
            status=409,
            param="call_id",
        )
    return _answer(settlement)


async def call_ledger(books: Books, request: Request) -> Response:
    return _answer(await books.reports.call(_word(request, "call_id")))


async def spending(books: Books, request: Request) -> Response:
    query = _query(request, forms.SpendingQuery)
    now = books.clock()
    since = (now // DAY_MS - query.days + 1) * DAY_MS
    days = await books.reports.spending(since=since, until=now + 1, account=query.account, key_id=query.key)
    return _answer({"spending": days})


async def earnings(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    return _answer({"nodes": await books.reports.earnings()})


# ---------------------------------------------------------------- guard and joins


async def get_rules(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    return await _rules(books)


async def change_rules(books: Books, request: Request) -> Response:
    change = (await _form(request, forms.RulesChange)).model_dump(exclude_unset=True)
    if "guard" in change:
        guard: dict[str, Any] | None = change["guard"]

        def fresh(kept: Any) -> dict[str, Any]:
            merged = {} if guard is None else {**(kept or {}), **guard}
            rules = {name: value for name, value in merged.items() if value is not None}
            GuardRules.from_dict(rules)
            return rules

        await books.settings.change(SETTING, fresh)
    if "mesh_share" in change:
        await books.settings.put(MESH_SHARE, change["mesh_share"] or 0)
    return await _rules(books)


async def _rules(books: Books) -> Response:
    share = int(await books.settings.get(MESH_SHARE, 0))
    return _answer({"mesh_share": share, "guard": dataclasses.asdict(await books.cases.rules())})


async def list_suspects(books: Books, request: Request) -> Response:
    query = _query(request, forms.SuspectsQuery)
    found = await books.cases.latest(only_open=query.open, limit=query.limit)
    suspects = [{**dataclasses.asdict(case), "checks": checks} for case, checks in found]
    return _answer({"suspects": suspects})


async def list_join_tokens(books: Books, request: Request) -> Response:
    _query(request, forms.NoQuery)
    return _answer({"join_tokens": await books.joins.list()})


async def create_join_token(books: Books, request: Request) -> Response:
    form = await _form(request, forms.NewJoinToken)
    token, secret = await books.joins.create(form.name, valid_ms=form.valid_ms, max_uses=form.max_uses)
    return _answer({"join_token": token, "secret": secret}, 201)


async def revoke_join_token(books: Books, request: Request) -> Response:
    return _answer(await books.joins.revoke(_number(request, "token_id")))


OPERATIONS: Final = (
    Operation(
        "GET",
        "/api/me",
        "The caller's own account, budgets and spending",
        me,
        query=forms.SpendingQuery,
        scope="use",
    ),
    Operation("GET", "/api/accounts", "All accounts", list_accounts),
    Operation("POST", "/api/accounts", "Open an account", create_account, forms.NewAccount, status=201),
    Operation("GET", "/api/accounts/{name}", "One account", get_account),
    Operation(
        "PATCH", "/api/accounts/{name}", "Lift or set an account's limit", change_account, forms.AccountChange
    ),
    Operation(
        "POST",
        "/api/accounts/{name}/deposits",
        "Put micro-units in, or take them out",
        deposit,
        forms.Deposit,
    ),
    Operation("GET", "/api/keys", "All keys, or those of an account", list_keys, query=forms.KeysQuery),
    Operation(
        "POST", "/api/keys", "Make a key; its secret is shown only here", create_key, forms.NewKey, status=201
    ),
    Operation("GET", "/api/keys/{key_id}", "One key", get_key),
    Operation(
        "PATCH",
        "/api/keys/{key_id}",
        "Change a key's name, models, expiry or limits",
        change_key,
        forms.KeyChange,
    ),
    Operation("DELETE", "/api/keys/{key_id}", "Revoke a key", revoke_key),
    Operation("GET", "/api/prices", "All prices, past and to come", list_prices),
    Operation("POST", "/api/prices", "Set a model's price", set_price, forms.NewPrice, status=201),
    Operation("GET", "/api/ledger", "Entries, a page at a time", list_entries, query=forms.LedgerQuery),
    Operation("GET", "/api/ledger/check", "Prove the ledger", check_ledger),
    Operation("GET", "/api/ledger/export", "The whole ledger as CSV", export_entries),
    Operation("POST", "/api/ledger/refund", "Refund a call", refund_call, forms.RefundOrder),
    Operation("GET", "/api/calls/{call_id}/ledger", "A call's charge, work and entries", call_ledger),
    Operation(
        "GET", "/api/spending", "Charges per day, account and key", spending, query=forms.SpendingQuery
    ),
    Operation("GET", "/api/earnings", "What the nodes did and earned", earnings),
    Operation("GET", "/api/settings/books", "The mesh's share and the guard's thresholds", get_rules),
    Operation(
        "PUT",
        "/api/settings/books",
        "Change the mesh's share or the guard's thresholds",
        change_rules,
        forms.RulesChange,
    ),
    Operation(
        "GET",
        "/api/suspects",
        "Suspect and audited calls with their checks",
        list_suspects,
        query=forms.SuspectsQuery,
    ),
    Operation("GET", "/api/join-tokens", "All join tokens", list_join_tokens),
    Operation(
        "POST",
        "/api/join-tokens",
        "Make a join token; its secret is shown only here",
        create_join_token,
        forms.NewJoinToken,
        status=201,
    ),
    Operation("DELETE", "/api/join-tokens/{token_id}", "Revoke a join token", revoke_join_token),
)
"""Every route. Paths are matched in this order."""
