"""The ASGI application: the front door for calls, Starlette for the rest, one shell around both."""

from __future__ import annotations

from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from meshnet.models.serving import PATH as WEIGHTS
from meshnet.models.serving import weight_routes
from meshnet.protocol.enrolment import PATH as ENROLMENT
from meshnet.protocol.errors import ApiError
from meshnet.tracker.answers import Tracker
from meshnet.tracker.api import Api
from meshnet.tracker.auth import header
from meshnet.tracker.bodies import ClientGone, Receive
from meshnet.tracker.books.api import routes as books_routes
from meshnet.tracker.books.records import BooksError, BooksUnavailable
from meshnet.tracker.door import PATHS, FrontDoor, request_id_of
from meshnet.tracker.openapi import document_route
from meshnet.tracker.pages import Pages
from meshnet.tracker.sinks import Header, Send, send_error

SECURITY: tuple[Header, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
API_CSP: Header = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json", "/api/join-info", ENROLMENT})
CORS_METHODS = b"GET, POST, PUT, PATCH, DELETE, OPTIONS"
CORS_HEADERS = b"authorization, content-type, x-request-id, x-meshnet-nodes, last-event-id"
CORS_EXPOSED = b"x-request-id, x-meshnet-call, x-meshnet-route, retry-after"

log = structlog.get_logger("meshnet.http")


class Shell:
    """Authenticates what is not open, sets the headers of every answer, sends calls to the front door."""

    def __init__(self, tracker: Tracker, door: FrontDoor) -> None:
        self._tracker = tracker
        self._door = door
        self._loopback = tracker.settings.loopback
        self._https_only = tracker.settings.https_only
        self._origins = frozenset(tracker.settings.cors_origins)
        api = Api(tracker)
        weights = weight_routes(tracker.library.find, tracker.library.refuse)
        routes = [*api.routes(), *weights, *Pages().routes(), document_route(), *_new_routes(api, tracker)]
        self._app = Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _api_error,
                BooksError: _books_error,
                HTTPException: _http_error,
                Exception: _unexpected,
            },
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        cors = self._cors(scope)
        if cors:
            scope["meshnet.headers"] = cors
        kind = PATHS.get(scope["path"])
        if self._https_only and scope["scheme"] == "http":
            await self._send_to_https(scope, send, cors)
            return
        if kind is not None and scope["method"] == "POST":
            await self._door(scope, receive, send, kind)
            return
        headers = [(b"x-request-id", request_id_of(scope).encode()), *SECURITY, *cors]
        if cors and scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            await _preflight(send, headers)
            return
        if kind is not None:
            error = ApiError(405, f"{scope['path']} takes POST", code="method_not_allowed")
            await send_error(send, error, [*headers, API_CSP, (b"allow", b"POST")])
            return
        try:
            await self._identify(scope)
        except ApiError as error:
            await send_error(send, error, [*headers, API_CSP])
            return
        try:
            await self._app(scope, receive, _with_headers(send, headers))
        except ClientGone:
            return

    async def _identify(self, scope: Any) -> None:
        """Puts the caller's key where endpoints look for it; open paths need none."""
        path = scope["path"]
        if path in OPEN or _is_page(path):
            return
        if path.startswith(f"{WEIGHTS}/"):
            return  # whoever reads weights shows a pass
        if path == "/metrics" and self._loopback:
            return
        if path == "/api/session" and scope["method"] in ("POST", "DELETE"):
            return
        scope.setdefault("state", {})["key"] = await self._tracker.authenticator.key_of(scope)

    async def _send_to_https(self, scope: Any, send: Send, cors: list[Header]) -> None:
        """Pages are shown where to go; what may hold a key is told that it should not have come this way."""
        host = header(scope, b"host") or ""
        if scope["method"] in ("GET", "HEAD") and (scope["path"] == "/" or _is_page(scope["path"])):
            # As it came: decoded, a path may hold what no header may.
            place = (b"location", f"https://{host}".encode("latin-1") + scope["raw_path"])
            await send({"type": "http.response.start", "status": 308, "headers": [place, *SECURITY, *cors]})
            await send({"type": "http.response.body", "body": b""})
            return
        error = ApiError(403, f"this tracker speaks HTTPS only: https://{host}", code="https_only")
        await send_error(send, error, [*SECURITY, *cors, API_CSP])

    def _cors(self, scope: Any) -> list[Header]:
        if not self._origins:
            return []
        origin = header(scope, b"origin")
        if origin is None or not ({origin, "*"} & self._origins):
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", CORS_EXPOSED),
            (b"vary", b"origin"),
        ]


def _is_page(path: str) -> bool:
    return path == "/dashboard" or path.startswith("/dashboard/")


def _new_routes(api: Api, tracker: Tracker) -> list[Any]:
    """The books' own routes, less those that this server answers itself."""
    own = {(method, route.path) for route in api.routes() for method in route.methods or ()}
    return [
        route
        for route in books_routes(tracker.books)
        if not any((method, route.path) in own for method in route.methods or ())
    ]


async def _preflight(send: Send, headers: list[Header]) -> None:
    extra = [
        (b"access-control-allow-methods", CORS_METHODS),
        (b"access-control-allow-headers", CORS_HEADERS),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": [*headers, *extra]})
    await send({"type": "http.response.body", "body": b""})


def _with_headers(send: Send, extra: list[Header]) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name for name, _ in given}
            csp = [] if b"content-security-policy" in names else [API_CSP]
            message = {**message, "headers": [*given, *extra, *csp]}
        await send(message)

    return sending


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    extra = {"cache-control": "no-store", **(headers or {})}
    if error.retry_after is not None:
        extra["retry-after"] = str(max(1, round(error.retry_after)))
    return Response(error.body(), error.status, extra, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _books_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BooksError)
    retry = error.retry_after if isinstance(error, BooksUnavailable) else None
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return error_response(
        ApiError(
            error.status, error.message, type=kind, code=error.code, param=error.param, retry_after=retry
        )
    )


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["allow"] = ", ".join(_methods(request))
    message = {
        404: f"there is nothing at {path}",
        405: f"{path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    shown = ApiError(error.status_code, message, code=_HTTP_CODES.get(error.status_code, "http_error"))
    return error_response(shown, headers)


def _methods(request: Request) -> list[str]:
    """Every method that some route of the path takes."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found.update(route.methods or ())
    return sorted(found)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("a request ran into a fault of the tracker", path=request.url.path, exc_info=error)
    return error_response(
        ApiError(
            500, "the tracker ran into a fault; its log says more", type="server_error", code="internal_error"
        )
    )
