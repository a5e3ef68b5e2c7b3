"""The management API as a client calls it: that of a running tracker over HTTP, or in this process.

In this process the same routes run on the tracker's own database, with the rights of an admin key: whoever
can open the database is its owner.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

from meshnet.tracker.books.records import BooksError, KeyInfo
from meshnet.tracker.settings import default_data_dir


class Failed(Exception):
    """What went wrong, for stderr."""


class Api:
    """The management API, of a running tracker or in this process."""

    def __init__(self, tracker: str, data: Path | None, database: str) -> None:
        if tracker and (data or database):
            raise Failed("--tracker cannot be given together with --data or --database")
        self._tracker = tracker.rstrip("/")
        self.where: str | Path = database or data or default_data_dir()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> Any:
        """One request; returns the JSON of its answer. Raises Failed with the API's message."""
        pieces: list[bytes] = []
        self.stream(method, path, pieces.append, body, query)
        return json.loads(b"".join(pieces))

    def stream(
        self,
        method: str,
        path: str,
        write: Callable[[bytes], Any],
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> None:
        """One request, whose answer goes to `write` piece by piece. Raises Failed with the API's message."""
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        target = path + (f"?{urlencode(asked)}" if asked else "")
        content = b"" if body is None else json.dumps(body).encode()
        send = self._over_http if self._tracker else self._in_process
        try:
            failure = asyncio.run(send(method, target, content, write))
        except BooksError as error:
            raise Failed(error.message) from error
        if failure is not None:
            raise Failed(failure)

    async def _over_http(
        self, method: str, target: str, content: bytes, write: Callable[[bytes], Any]
    ) -> str | None:
        import aiohttp

        secret = os.environ.get("MESHNET_API_KEY", "")
        if not secret:
            raise Failed("MESHNET_API_KEY is not set; it must hold an admin key")
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        url = self._tracker + target
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, url, data=content or None, headers=headers) as response,
            ):
                if response.status >= 400:
                    return _message(response.status, await response.read())
                async for piece in response.content.iter_any():
                    write(piece)
                return None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Failed(f"the tracker at {self._tracker} cannot be reached: {error}") from error

    async def _in_process(
        self, method: str, target: str, content: bytes, write: Callable[[bytes], Any]
    ) -> str | None:
        from starlette.applications import Starlette

        from meshnet.tracker.books import Books
        from meshnet.tracker.books.api import routes
        from meshnet.tracker.books.storage import database_url

        url = database_url(self.where)
        file = url.database if url.get_backend_name() == "sqlite" else None
        if file is not None and not await asyncio.to_thread(Path(file).exists):
            raise Failed(f"there are no books at {file}; start the tracker once, or give its --data DIR")
        async with await Books.open(self.where) as books:
            return await _as_owner(Starlette(routes=routes(books)), method, target, content, write)


async def _as_owner(
    app: Any, method: str, target: str, content: bytes, write: Callable[[bytes], Any]
) -> str | None:
    """One request to an ASGI application in this process, with the rights of an admin key."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": None,
        "server": None,
        "state": {"key": KeyInfo(0, "owner", 0, "", "admin", 0)},
    }
    status = 500
    failure = b""
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            # A streamed answer waits here for the client to leave, which it never does.
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status, failure
        if message["type"] == "http.response.start":
            status = message["status"]
        elif status >= 400:
            failure += message.get("body", b"")
        else:
            write(message.get("body", b""))

    await app(scope, receive, send)
    return _message(status, failure) if status >= 400 else None


def _message(status: int, answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the tracker answered {status}"
