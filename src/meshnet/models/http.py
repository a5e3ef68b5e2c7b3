"""Models behind an HTTP server: their bytes by range, and their headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import aiohttp

from meshnet.models.errors import BadGGUF, FetchFailed
from meshnet.models.gguf import ModelFile, SourceFile, assemble
from meshnet.models.header import MAX_HEADER_BYTES, Tensor, parse_header
from meshnet.models.metadata import Metadata
from meshnet.models.remote import SourceCut
from meshnet.models.serving import PATH, read_bounded, read_manifest

CHUNK = 1 << 20
HEADER_FIRST_READ = 1 << 20
CONNECT_S = 10.0
SILENCE_S = 30.0


class HttpSource:
    """Files behind HTTP addresses, read with Range requests.

    `urls` has one address per file of the model. The session is the caller's, with its TLS and tokens.
    `redirects`: whether to go where a server sends on to, with the same headers; hubs do so.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        headers: Mapping[str, str] | None = None,
        *,
        redirects: bool = True,
    ) -> None:
        self._redirects = redirects
        self._session = session
        self._urls = list(urls)
        self._headers = {**(headers or {}), "Accept-Encoding": "identity"}

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """Raises SourceCut where a later try may help, FetchFailed where it will not."""
        url = self._urls[file_index]
        shown = _without_query(url)
        headers = {**self._headers, "Range": f"bytes={offset}-{offset + length - 1}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        try:
            async with self._session.get(
                url, headers=headers, timeout=timeout, allow_redirects=self._redirects
            ) as response:
                _check_answer(shown, response, offset, length)
                async for chunk in response.content.iter_chunked(CHUNK):
                    yield chunk
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise SourceCut(f"{shown}: {str(error) or type(error).__name__}") from error

    async def size(self, file_index: int) -> int:
        """The size of a file in bytes, as a one-byte range request tells it."""
        url = self._urls[file_index]
        shown = _without_query(url)
        try:
            async with self._session.get(url, headers={**self._headers, "Range": "bytes=0-0"}) as response:
                _check_answer(shown, response, 0, 1)
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise SourceCut(f"{shown}: {str(error) or type(error).__name__}") from error
        if not total.isdigit():
            raise FetchFailed(f"{shown}: the server does not tell the file's size; use another server")
        return int(total)


def _check_answer(shown: str, response: aiohttp.ClientResponse, offset: int, length: int) -> None:
    status = response.status
    if status in (408, 425, 429) or status >= 500:
        raise SourceCut(f"{shown}: answered {status} {response.reason or ''}".rstrip())
    if status in (401, 403):
        raise FetchFailed(f"{shown}: answered {status}; a valid token or ticket is needed for it")
    if status == 404:
        raise FetchFailed(f"{shown}: answered 404, no such file there; fetch from elsewhere")
    if status == 200 or (status == 206 and "Content-Range" not in response.headers):
        raise FetchFailed(f"{shown}: the server ignores byte ranges; use one that serves them")
    if status != 206:
        raise FetchFailed(f"{shown}: answered {status} {response.reason or ''} to a range request".rstrip())
    stated = response.headers["Content-Range"].partition("/")[0]
    if stated != f"bytes {offset}-{offset + length - 1}":
        raise FetchFailed(f"{shown}: sent the range '{stated}' for bytes {offset}-{offset + length - 1}")


def _without_query(url: str) -> str:
    """An address without what may carry a signature."""
    return url.partition("?")[0]


class _NeedMore(Exception):
    """The parser wants bytes that were not fetched yet, up to `end`."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


async def get_bounded(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout,
    limit: int = MAX_HEADER_BYTES,
) -> bytes:
    """What a machine of the mesh answers, at most `limit` bytes; it is not followed elsewhere.

    Raises ModelError, and what aiohttp raises.
    """
    async with session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
        if answer.status != 200:
            raise FetchFailed(f"{url}: answered {answer.status} {answer.reason or ''}".rstrip())
        return await read_bounded(answer.content.iter_chunked(CHUNK), limit)


async def fetch_manifest(
    session: aiohttp.ClientSession,
    base: str,
    fingerprint: str,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout,
) -> ModelFile:
    """The description of a model that a machine of the mesh gives, checked. Raises as `get_bounded`."""
    data = await get_bounded(session, f"{base}{PATH}/{fingerprint}", headers, timeout)
    return await asyncio.to_thread(read_manifest, data, fingerprint)


async def open_remote(source: HttpSource, names: Sequence[str]) -> ModelFile:
    """Read the header of a model that is on no disk here; `names` are its files' names, in order.

    Only as much as the headers take is fetched. Raises what `ModelFile.open` raises, and FetchFailed.
    """
    parts: list[tuple[SourceFile, Metadata, list[Tensor]]] = []
    for index, name in enumerate(names):
        size = await source.size(index)
        data = bytearray()
        want = min(HEADER_FIRST_READ, size)
        while True:
            if want > MAX_HEADER_BYTES:
                raise BadGGUF(f"{name}: a header of more than {MAX_HEADER_BYTES} bytes; the file is damaged")
            async for chunk in source.read(index, len(data), want - len(data)):
                data += chunk
            try:
                metadata, tensors = parse_header(name, size, _reader(bytes(data)), index)
            except _NeedMore as more:
                want = min(max(more.end, 2 * want), size)
                continue
            parts.append((SourceFile(name, size, None), metadata, tensors))
            break
    return assemble(names[0], parts)


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        if offset + length > len(data):
            raise _NeedMore(offset + length)
        return data[offset : offset + length]

    return read
