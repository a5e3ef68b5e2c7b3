"""The OpenAPI document of the tracker's interface."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshnet import __version__


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "meshnet tracker", "version": __version__},
        "paths": {},
    }


def document_route() -> Route:
    body = msgspec.json.encode(document())

    async def endpoint(request: Request) -> Response:
        return Response(body, media_type="application/json")

    return Route("/openapi.json", endpoint, methods=["GET"])
