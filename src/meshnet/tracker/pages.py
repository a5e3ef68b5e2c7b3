"""The dashboard's files, as built into the package; where they are missing, a page says how to build them."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

import meshnet
from meshnet.protocol.errors import ApiError

DIST = Path(meshnet.__file__).parent / "web" / "dist"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NOT_BUILT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>meshnet</title>
<h1>The dashboard is not built</h1>
<p>This is a development checkout. Build the dashboard with <code>make web</code> (or
<code>python hatch_build.py --web</code>) and load this page again. Installed wheels carry it.</p>
<p>The endpoint at <code>/v1</code> works without it.</p></html>"""


class Pages:
    """Serves `/dashboard` and all under it; unknown addresses there are the page itself (deep links)."""

    def __init__(self, dist: Path = DIST) -> None:
        self._dist = dist

    def routes(self) -> list[Route]:
        return [
            Route("/", self.root, methods=["GET"]),
            Route("/dashboard", self.page, methods=["GET"]),
            Route("/dashboard/{path:path}", self.page, methods=["GET"]),
        ]

    async def root(self, request: Request) -> Response:
        return RedirectResponse("/dashboard", 307)

    async def page(self, request: Request) -> Response:
        index = self._dist / "index.html"
        if not index.is_file():
            return HTMLResponse(NOT_BUILT, 503, {"content-security-policy": "default-src 'none'"})
        path = request.path_params.get("path", "")
        found = self._file(path)
        if found is None:
            if "." in path.rsplit("/", 1)[-1]:
                raise ApiError(404, f"there is no file {path[:100]!r}", code="not_found")
            return self._send(request, index, "text/html; charset=utf-8", "no-cache")
        # Built files carry a hash of their content in their names.
        cache = "public, max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
        kind = mimetypes.guess_type(found.name)[0] or "application/octet-stream"
        return self._send(request, found, kind, cache)

    def _send(self, request: Request, found: Path, kind: str, cache: str) -> Response:
        """The file, or what the build packed beside it where the client takes gzip."""
        headers = {"content-security-policy": CSP, "cache-control": cache, "vary": "accept-encoding"}
        packed = found.with_name(f"{found.name}.gz")
        if "gzip" in request.headers.get("accept-encoding", "") and packed.is_file():
            found, headers["content-encoding"] = packed, "gzip"
        return FileResponse(found, media_type=kind, headers=headers)

    def _file(self, path: str) -> Path | None:
        if not path:
            return None
        found = (self._dist / path).resolve()
        inside = found.is_relative_to(self._dist.resolve())
        return found if inside and found.is_file() else None
