"""Weights over HTTP: `/weights/FINGERPRINT` is a model's manifest, `/held` says which of its bytes are here,
`/files/N` are those bytes, by range. The tracker and every node serve them to whoever may read them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from meshnet.models.errors import BadGGUF, HashMismatch, ModelError
from meshnet.models.fingerprint import verify
from meshnet.models.gguf import ModelFile
from meshnet.models.header import MAX_HEADER_BYTES
from meshnet.models.origins import Origin, Origins, Span

PATH = "/weights"
MAX_SPANS = 1 << 16
_RANGE = re.compile(r"^bytes=(\d{1,18})-(\d{1,18})$")


class Shelved:
    """A model that is here, whole or in part: its description, and where the bytes lie."""

    def __init__(self, model: ModelFile, origins: list[Origin]) -> None:
        """`model` knows its fingerprint and tensor hashes. No origin: only the description is here."""
        self.model = model
        self._origins = origins
        self._manifest: bytes | None = None

    @property
    def manifest(self) -> bytes:
        if self._manifest is None:
            self._manifest = self.model.to_manifest()
        return self._manifest

    @property
    def spans(self) -> list[Span]:
        """All bytes that are here."""
        found: list[Span] = []
        for origin in self._origins:
            if origin.spans is None:
                return [(index, 0, file.n_bytes) for index, file in enumerate(self.model.files)]
            found += origin.spans
        return sorted(set(found))

    def reader(self) -> Origins:
        return Origins(self._origins)

    def has(self, file_index: int, offset: int, end: int) -> bool:
        while offset < end:
            reach = max((o.reach(file_index, offset, end) for o in self._origins), default=offset)
            if reach <= offset:
                return False
            offset = reach
        return True


def weight_routes(
    find: Callable[[str], Shelved | None], refuse: Callable[[Request, str], Response | None]
) -> list[Route]:
    """Routes for Starlette. `refuse(request, fingerprint)` answers those who may not read these weights."""

    def served(handler: Callable[[Request, Shelved], Response]) -> Any:
        async def serve(request: Request) -> Response:
            fingerprint = request.path_params["fingerprint"]
            refused = refuse(request, fingerprint)
            if refused is not None:
                return refused
            found = find(fingerprint)
            if found is None:
                return _error(404, "these weights are not here")
            return handler(request, found)

        return serve

    base = PATH + "/{fingerprint}"
    return [
        Route(base, served(_manifest), methods=["GET"]),
        Route(base + "/held", served(_held), methods=["GET"]),
        Route(base + "/files/{index:int}", served(_range), methods=["GET"]),
    ]


def _manifest(_request: Request, found: Shelved) -> Response:
    return Response(found.manifest, media_type="application/msgpack")


def _held(_request: Request, found: Shelved) -> Response:
    return JSONResponse({"spans": found.spans})


def _range(request: Request, found: Shelved) -> Response:
    index, files = request.path_params["index"], found.model.files
    if index >= len(files):
        return _error(404, f"the model has {len(files)} files")
    match = _RANGE.match(request.headers.get("range", ""))
    if match is None:
        return _error(416, "ask for one range of bytes: Range: bytes=FIRST-LAST")
    first, last = int(match[1]), int(match[2])
    size = files[index].n_bytes
    if not first <= last < size or not found.has(index, first, last + 1):
        return _error(416, f"bytes {first}-{last} are not here", {"content-range": f"bytes */{size}"})
    headers = {
        "content-range": f"bytes {first}-{last}/{size}",
        "content-length": str(last + 1 - first),
        "cache-control": "no-store",
    }
    body = found.reader().read(index, first, last + 1 - first)
    return StreamingResponse(body, 206, headers, "application/octet-stream")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "code": "weights"}}, status, headers)


def read_manifest(data: bytes, fingerprint: str) -> ModelFile:
    """The model of this fingerprint, as a manifest describes it, proven by it. Raises ModelError."""
    model = ModelFile.from_manifest(data)
    if model.fingerprint != fingerprint:
        raise HashMismatch("the manifest is another model's than was asked for")
    verify(model)
    return model


def read_spans(data: bytes) -> tuple[Span, ...]:
    """What `/held` answered. Raises ModelError for anything else."""
    try:
        spans = tuple((int(a), int(b), int(c)) for a, b, c in json.loads(data)["spans"][:MAX_SPANS])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"a list of held bytes cannot be read: {error}") from error
    return spans


async def read_bounded(chunks: AsyncIterator[bytes], limit: int = MAX_HEADER_BYTES) -> bytes:
    """All of an answer's body. Raises BadGGUF beyond `limit`."""
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise BadGGUF(f"model manifest: more than {limit} bytes; ask another machine for it")
        parts.append(chunk)
    return b"".join(parts)
