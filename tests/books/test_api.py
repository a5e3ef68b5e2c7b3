"""The management API over a real socket, as the tracker serves it, on both databases."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import uvicorn
from books.kit import START, Kit, usage
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet.tracker.books import Books
from meshnet.tracker.books.api import OPERATIONS, routes
from meshnet.tracker.books.guard import Case, Impossible


class Keyed:
    """Middleware as the tracker has it: puts the key of the Authorization header into the request's state."""

    def __init__(self, app: ASGIApp, books: Books) -> None:
        self.app = app
        self.books = books

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = dict(scope["headers"]).get(b"authorization", b"").decode()
            key = await self.books.authenticate(header.removeprefix("Bearer "))
            scope.setdefault("state", {})["key"] = key
        await self.app(scope, receive, send)


@dataclass
class Client:
    """A client of the API with a key."""

    session: aiohttp.ClientSession
    base: str
    secret: str

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        given = {"authorization": f"Bearer {self.secret}", **headers}
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            given.setdefault("content-type", "application/json")
        async with self.session.request(method, self.base + path, data=data, headers=given) as response:
            text = await response.text()
            return response.status, json.loads(text) if text[:1] == "{" else text


@dataclass
class Served:
    kit: Kit
    base: str
    admin: Client
    user: Client
    nobody: Client


async def serve(app: ASGIApp) -> tuple[uvicorn.Server, asyncio.Task[None], str]:
    """Serves `app` on a free port of the loopback."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve([bound]))
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.01)
    return server, task, f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
async def served(kit: Kit) -> AsyncIterator[Served]:
    app = Starlette(routes=routes(kit.books), middleware=[Middleware(Keyed, books=kit.books)])
    server, task, base = await serve(app)
    async with aiohttp.ClientSession() as session:
        clients = [Client(session, base, s) for s in (kit.secrets.admin_key, kit.secrets.use_key, "mn-no")]
        yield Served(kit, base, *clients)
    server.should_exit = True
    await task


async def test_accounts(served: Served) -> None:
    admin = served.admin
    status, made = await admin("POST", "/api/accounts", {"name": "bob"})
    assert (status, made["name"], made["unlimited"], made["balance"]) == (201, "bob", False, 0)
    assert (await admin("POST", "/api/accounts/bob/deposits", {"amount": 500, "why": "cash"}))[1][
        "balance"
    ] == 500
    assert (await admin("PATCH", "/api/accounts/bob", {"unlimited": True}))[1]["unlimited"] is True
    assert (await admin("GET", "/api/accounts/bob"))[1]["balance"] == 500
    status, listed = await admin("GET", "/api/accounts")
    assert [account["name"] for account in listed["accounts"]] == ["home", "small", "bob"]
    status, refused = await admin("POST", "/api/accounts", {"name": "bob"})
    assert status == 409
    assert refused["error"] == {
        "message": "an account named 'bob' exists already",
        "type": "invalid_request_error",
        "code": "account_exists",
        "param": "name",
    }


async def test_keys(served: Served) -> None:
    admin = served.admin
    body = {"account": "small", "name": "laptop", "models": ["B", "a"], "monthly_budget": 10}
    status, made = await admin("POST", "/api/keys", body)
    assert status == 201
    key, secret = made["key"], made["secret"]
    assert (key["models"], key["monthly_budget"], key["scope"]) == (["a", "b"], 10, "use")
    theirs = Client(admin.session, served.base, secret)
    status, me = await theirs("GET", "/api/me")
    assert (status, me["key"]["id"], me["balance"]) == (200, key["id"], 1_000)
    status, changed = await admin("PATCH", f"/api/keys/{key['id']}", {"monthly_budget": None, "name": "desk"})
    assert (changed["monthly_budget"], changed["name"], changed["models"]) == (None, "desk", ["a", "b"])
    status, listed = await admin("GET", "/api/keys?account=small")
    assert [found["name"] for found in listed["keys"]] == ["small key", "desk"]
    assert secret not in json.dumps(listed)
    status, revoked = await admin("DELETE", f"/api/keys/{key['id']}")
    assert (status, revoked["revoked_at"]) == (200, START)
    assert (await theirs("GET", "/api/me"))[0] == 401
    assert (await admin("GET", f"/api/keys/{key['id']}"))[1]["revoked_at"] == START


async def test_prices(served: Served) -> None:
    status, made = await served.admin("POST", "/api/prices", {"model": "*", "input": 5, "output": 6})
    assert (status, made) == (201, {"model": "*", "input": 5, "output": 6, "valid_from": START})
    listed = (await served.admin("GET", "/api/prices"))[1]["prices"]
    assert [(price["model"], price["input"]) for price in listed] == [("*", 5), ("paid", 1_000_000)]


async def test_the_ledger_of_calls(served: Served) -> None:
    kit, admin = served.kit, served.admin
    await kit.reserve("c1")
    await kit.books.settle("c1", usage(100, 10))
    await kit.books.reserve("free", kit.small, "free", 1, 1)
    await kit.books.settle("free", usage(1, 1))
    status, report = await admin("GET", "/api/ledger/check")
    assert (status, report) == (200, {"ok": True, "calls": 2, "entries": 8, "problems": []})
    status, call = await admin("GET", "/api/calls/c1/ledger")
    assert (call["charge"], len(call["entries"]), len(call["work"])) == (120, 6, 2)
    status, page = await admin("GET", "/api/ledger?limit=3&call=c1")
    assert len(page["entries"]) == 3
    status, rest = await admin("GET", f"/api/ledger?limit=4&call=c1&after={page['next_after']}")
    assert (len(rest["entries"]), rest["next_after"]) == (3, None)
    assert len((await admin("GET", "/api/ledger?account=small"))[1]["entries"]) == 8
    status, text = await admin("GET", "/api/ledger/export")
    assert len(text.splitlines()) == 1 + 8
    status, spent = await admin("GET", "/api/spending?days=1")
    assert [(day["account"], day["calls"], day["charge"]) for day in spent["spending"]] == [("small", 2, 120)]
    status, earned = await admin("GET", "/api/earnings")
    assert [(node["node_id"], node["earned"]) for node in earned["nodes"]] == [("alpha", 60), ("beta", 60)]
    status, refunded = await admin("POST", "/api/ledger/refund", {"call_id": "c1", "why": "garbled"})
    assert (status, refunded["status"]) == (200, "refunded")
    status, refused = await admin("POST", "/api/ledger/refund", {"call_id": "free", "why": "x"})
    assert (status, refused["error"]["code"]) == (409, "nothing_charged")
    status, refused = await admin("POST", "/api/ledger/refund", {"call_id": "none", "why": "x"})
    assert (status, refused["error"]["code"]) == (404, "unknown_call")
    assert (await admin("GET", "/api/ledger/check"))[1]["ok"] is True


async def test_a_use_key_sees_its_own_account_and_nothing_else(served: Served) -> None:
    kit = served.kit
    await kit.reserve("c1", kit.key)
    await kit.books.settle("c1", usage(100, 10))
    status, me = await served.user("GET", "/api/me")
    assert status == 200
    assert (me["balance"], me["held"], me["unlimited"]) == (-120, 0, True)
    assert (me["spent_this_month"], me["spent_in_all"]) == (120, 120)
    assert [day["charge"] for day in me["spending"]] == [120]
    for operation in OPERATIONS:
        path = operation.path.format(name="home", key_id=1, call_id="c1", token_id=1)
        assert (await served.nobody(operation.method, path))[0] == 401
        if operation.scope == "admin":
            status, refused = await served.user(operation.method, path)
            assert (status, refused["error"]["type"]) == (403, "permission_error")


async def test_suspects_and_their_checks(served: Served) -> None:
    kit = served.kit
    await kit.reserve("c1")
    await kit.books.hold("c1", usage(100, 1))
    await kit.books.open_case(Case("c1", "suspect", "paid", ("alpha", "beta"), "ended by itself", START))
    listed = (await served.admin("GET", "/api/suspects?open=true"))[1]
    assert [(case["call_id"], case["state"], case["route"]) for case in listed["suspects"]] == [
        ("c1", "waiting", ["alpha", "beta"])
    ]
    await kit.books.advance("c1", Impossible("no other route"))
    assert (await served.admin("GET", "/api/suspects?open=true"))[1]["suspects"] == []
    (case,) = (await served.admin("GET", "/api/suspects"))[1]["suspects"]
    assert (case["state"], case["checks"]) == ("unchecked", [])


async def test_join_tokens(served: Served) -> None:
    status, made = await served.admin("POST", "/api/join-tokens", {"name": "garage", "max_uses": 1})
    assert (status, made["join_token"]["expires_at"]) == (201, START + 86_400_000)
    await served.kit.books.joins.admit(made["secret"], "node")
    listed = (await served.admin("GET", "/api/join-tokens"))[1]["join_tokens"]
    assert [(token["name"], token["uses"]) for token in listed] == [("first join token", 0), ("garage", 1)]
    status, gone = await served.admin("DELETE", f"/api/join-tokens/{made['join_token']['id']}")
    assert gone["revoked_at"] == START


BAD: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "/api/accounts", {}, 400, "name"),
    ("POST", "/api/accounts", {"name": ""}, 400, "name"),
    ("POST", "/api/accounts", {"name": "a/b"}, 400, "name"),
    ("POST", "/api/accounts", {"name": "a\0b"}, 400, "name"),
    ("POST", "/api/accounts", {"name": "x", "extra": 1}, 400, "extra"),
    ("POST", "/api/accounts", {"name": "x", "unlimited": "yes"}, 400, "unlimited"),
    ("POST", "/api/accounts", b"{", 400, None),
    ("POST", "/api/accounts", b"[]", 400, None),
    ("POST", "/api/accounts", b'{"name": "\\ud800"}', 400, None),
    ("POST", "/api/accounts", b" " * 70_000, 413, None),
    ("POST", "/api/accounts/small/deposits", {"amount": 0}, 400, "amount"),
    ("POST", "/api/accounts/small/deposits", {"amount": 1.5}, 400, "amount"),
    ("POST", "/api/accounts/small/deposits", {"amount": 10**18}, 400, "amount"),
    ("POST", "/api/accounts/small/deposits", {"amount": -1_001}, 409, "amount"),
    ("POST", "/api/accounts/none/deposits", {"amount": 1}, 404, "account"),
    ("GET", "/api/accounts/none", None, 404, "account"),
    ("GET", "/api/accounts/%00", None, 404, "name"),
    ("POST", "/api/keys", {"account": "none", "name": "k"}, 404, "account"),
    ("POST", "/api/keys", {"account": "home", "name": "k", "scope": "root"}, 400, "scope"),
    ("POST", "/api/keys", {"account": "home", "name": "k", "monthly_budget": -1}, 400, "monthly_budget"),
    ("POST", "/api/keys", {"account": "home", "name": "k", "expires_at": 5}, 400, "expires_at"),
    ("PATCH", "/api/keys/1", {"scope": "use"}, 400, "scope"),
    ("GET", "/api/keys/99", None, 404, "key"),
    ("GET", "/api/keys/abc", None, 404, "key_id"),
    ("DELETE", "/api/keys/99999999999999999999999", None, 404, "key_id"),
    ("GET", "/api/keys?account=a&account=b", None, 400, "account"),
    ("GET", "/api/keys?other=1", None, 400, "other"),
    ("POST", "/api/prices", {"model": "m", "input": -1, "output": 0}, 400, "input"),
    ("POST", "/api/prices", {"model": "m", "input": 0, "output": 0, "valid_from": 1}, 400, "valid_from"),
    ("GET", "/api/ledger?limit=0", None, 400, "limit"),
    ("GET", "/api/ledger?after=99999999999999999999", None, 400, "after"),
    ("GET", "/api/ledger?call=%00", None, 400, "call"),
    ("GET", "/api/calls/none/ledger", None, 404, "call_id"),
    ("GET", "/api/spending?days=0", None, 400, "days"),
    ("GET", "/api/spending?days=99999", None, 400, "days"),
    ("POST", "/api/ledger/refund", {"call_id": "c", "why": ""}, 400, "why"),
    ("POST", "/api/join-tokens", {"max_uses": 0}, 400, "max_uses"),
    ("DELETE", "/api/join-tokens/99", None, 404, None),
]


async def test_bad_requests_name_the_field(served: Served) -> None:
    for method, path, body, expected, param in BAD:
        status, answer = await served.admin(method, path, body)
        assert status == expected, (method, path, body, answer)
        assert answer["error"]["param"] == param, (method, path, body, answer)
        assert answer["error"]["message"]


async def test_other_methods_and_content_types(served: Served) -> None:
    assert (await served.admin("PUT", "/api/accounts", {}))[0] == 405
    assert (await served.admin("HEAD", "/api/accounts"))[0] == 200
    status, answer = await served.admin("POST", "/api/accounts", b"name=x", **{"content-type": "text/plain"})
    assert (status, answer["error"]["code"]) == (415, "bad_content_type")


async def test_a_database_that_is_away_is_a_503(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshnet.tracker.books import BooksUnavailable

    async def away(function: Callable[..., Awaitable[Any]]) -> Any:
        raise BooksUnavailable("the database is away")

    assert (await served.admin("GET", "/api/accounts"))[0] == 200
    monkeypatch.setattr(served.kit.books.storage, "read", away)
    async with served.admin.session.get(
        served.base + "/api/accounts", headers={"authorization": f"Bearer {served.admin.secret}"}
    ) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        assert (await response.json())["error"]["code"] == "books_unavailable"


async def test_the_meshs_share_and_the_guards_thresholds(served: Served) -> None:
    admin, books = served.admin, served.kit.books
    path = "/api/settings/books"
    defaults = {
        "min_tokens": 4,
        "check_ms": 3_600_000,
        "audit_ppm": 10_000,
        "max_gap": 1.5,
        "max_attempts": 3,
    }
    assert await admin("GET", path) == (200, {"mesh_share": 0, "guard": defaults})
    status, changed = await admin("PUT", path, {"mesh_share": 500, "guard": {"min_tokens": 2, "max_gap": 2}})
    assert (status, changed["mesh_share"]) == (200, 500)
    assert changed["guard"] == {**defaults, "min_tokens": 2, "max_gap": 2.0}
    assert (await books.cases.rules()).min_tokens == 2
    _, changed = await admin("PUT", path, {"guard": {"min_tokens": None, "audit_ppm": 0}})
    assert changed == {"mesh_share": 500, "guard": {**defaults, "max_gap": 2.0, "audit_ppm": 0}}
    _, changed = await admin("PUT", path, {"mesh_share": None, "guard": None})
    assert changed == {"mesh_share": 0, "guard": defaults}
    for body, param in (
        ({"guard": {"min_tokens": 65}}, "guard.min_tokens"),
        ({"mesh_share": 10_001}, "mesh_share"),
        ({"guard": {"audit": 1}}, "guard.audit"),
    ):
        status, refused = await admin("PUT", path, body)
        assert (status, refused["error"]["param"]) == (400, param)
    assert (await served.user("PUT", path, {"mesh_share": 1}))[0] == 403
