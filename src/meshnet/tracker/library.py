"""The weights that the tracker can describe or serve: its own files, a hub's, what nodes tell of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import aiohttp
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.requests import Request
from starlette.responses import Response

from meshnet.models.errors import FetchFailed, HashMismatch, ModelError, ModelNotFound
from meshnet.models.files import write_atomically
from meshnet.models.fingerprint import Fingerprint, combine, with_fingerprint
from meshnet.models.gguf import ModelFile
from meshnet.models.http import HttpSource, fetch_manifest, open_remote
from meshnet.models.origins import Origin
from meshnet.models.pulls import hub_address, hub_files, hub_headers
from meshnet.models.remote import ByteSource, FetchProgress, SourceCut, hash_source
from meshnet.models.serving import Shelved, read_manifest
from meshnet.models.sources import LocalSource
from meshnet.models.store import Store, as_id
from meshnet.protocol.passes import PASS_HEADER, PASS_MS, WeightsPass, sign_pass, verify_pass
from meshnet.protocol.tickets import TicketError

MAX_MANIFESTS = 64
ATTEMPTS = 6
LEARN_FROM = 3
"""Nodes that are asked for a description, one after the other."""
CONNECT_S = 5.0
ANSWER_S = 15.0
_SHA256 = re.compile(r"^[0-9a-f]{64}$")

log = structlog.get_logger("meshnet.library")

Report = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A model that the tracker knows now. `files` are its addresses on a hub, where it is not here."""

    model_id: str
    fingerprint: str
    aliases: tuple[str, ...]
    files: tuple[str, ...]


class Library:
    """Models by fingerprint. `mesh_session` opens sessions to machines of the mesh."""

    def __init__(
        self,
        store: Store,
        mesh_id: str,
        key: Ed25519PrivateKey,
        mesh_session: Callable[[], aiohttp.ClientSession] = aiohttp.ClientSession,
    ) -> None:
        self._store = store
        self._mesh_id = mesh_id
        self._key = key
        self._mesh_session = mesh_session
        self._shelved: dict[str, Shelved] = {}

    def find(self, fingerprint: str) -> Shelved | None:
        """What is known of a model here, its bytes where they are here."""
        return self._shelved.get(fingerprint)

    def model(self, fingerprint: str) -> ModelFile | None:
        """The model's description."""
        found = self._shelved.get(fingerprint)
        return None if found is None else found.model

    # ------------------------------------------------------------ passes

    def pass_for(self, node_id: str, fingerprint: str) -> str:
        """What lets a node read a model's weights from the tracker and from other nodes."""
        expires_ms = time.time_ns() // 1_000_000 + PASS_MS
        return sign_pass(WeightsPass(self._mesh_id, fingerprint, node_id, expires_ms), self._key)

    def refuse(self, request: Request, fingerprint: str) -> Response | None:
        """The answer to who may not read these weights."""
        try:
            verify_pass(
                request.headers.get(PASS_HEADER, ""),
                self._key.public_key(),
                mesh_id=self._mesh_id,
                fingerprint=fingerprint,
                now_ms=time.time_ns() // 1_000_000,
            )
        except TicketError as error:
            return Response(str(error), 401, media_type="text/plain")
        return None

    # ------------------------------------------------------------ models that somebody asks for

    async def take(self, what: str, report: Report | None = None) -> Taken:
        """Makes a model known: a name, a path on this machine, or `hf:ORG/REPO/FILE.gguf`.

        A file on a hub stays there: its header is read and its bytes are streamed through once for their
        hashes, unless it was pulled to this machine before. Raises ModelError.
        """
        if what.startswith("hf:") and not await asyncio.to_thread(self._is_here, what):
            return await self._take_hub(what, report)
        stored = await asyncio.to_thread(self._store.pull, what, progress=report)
        model = await asyncio.to_thread(lambda: self._store.identified(self._store.open(stored.id)))
        self._shelved[model.fingerprint] = Shelved(model, [Origin("here", LocalSource(model))])
        return Taken(stored.id, model.fingerprint, stored.aliases, ())

    def _is_here(self, what: str) -> bool:
        with contextlib.suppress(ModelNotFound):
            return self._store.resolve(what).path.is_file()
        return False

    async def _take_hub(self, what: str, report: Report | None) -> Taken:
        repo, names = hub_files(what)
        urls = tuple(f"{hub_address()}/{repo}/resolve/main/{quote(name)}" for name in names)
        headers = hub_headers(urls)
        async with aiohttp.ClientSession() as session:
            source = HttpSource(session, urls, headers)
            model = await open_remote(source, [name.rpartition("/")[2] for name in names])
            stated = await asyncio.gather(*(_stated_sha256(session, url, headers) for url in urls))

            def told(progress: FetchProgress) -> None:
                if report is not None:
                    report(progress.done, progress.total)

            hashes = await hash_source(
                model,
                _Patient(source),
                file_sha256={index: value for index, value in enumerate(stated) if value},
                report=told,
            )
        found = await asyncio.to_thread(
            lambda: with_fingerprint(model, Fingerprint(combine(model, hashes), hashes))
        )
        await self._keep(found)
        return Taken(as_id(found.name), found.fingerprint, (), urls)

    async def restore(self, what: str, fingerprint: str, files: Sequence[str], bases: Iterable[str]) -> None:
        """Makes a model known that `take` made known in an earlier run, or at another tracker.

        From what is here, by what those at `bases` say of it, else from its source anew. Raises ModelError.
        """
        if fingerprint in self._shelved:
            return
        if not files and await asyncio.to_thread(self._is_here, what):
            taken = await self.take(what)
            if taken.fingerprint == fingerprint:
                return
        try:
            await self.learn(fingerprint, bases)
        except ModelError:
            taken = await self.take(what)
            if taken.fingerprint != fingerprint:
                raise HashMismatch(
                    f"{what} is another model than when it was loaded; load it again"
                ) from None

    # ------------------------------------------------------------ models that nodes hold

    async def learn(self, fingerprint: str, bases: Iterable[str]) -> ModelFile:
        """The description of a model that nodes hold, from one of them. Raises ModelError."""
        if not _SHA256.match(fingerprint):
            raise FetchFailed(f"{fingerprint[:80]!r} is no fingerprint: 64 digits of a sha256")
        known = self.model(fingerprint) or await asyncio.to_thread(self._read, fingerprint)
        problem: Exception = FetchFailed("no node that holds it can be asked")
        if known is None:
            headers = {PASS_HEADER: self.pass_for("tracker", fingerprint)}
            timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
            async with self._mesh_session() as session:
                for base in islice(bases, LEARN_FROM):
                    try:
                        known = await fetch_manifest(session, base, fingerprint, headers, timeout)
                        break
                    except (ModelError, aiohttp.ClientError, TimeoutError, OSError) as error:
                        problem = error
        if known is None:
            raise FetchFailed(f"the model's description cannot be had: {problem}") from problem
        await self._keep(known)
        return known

    async def _keep(self, model: ModelFile) -> None:
        shelved = await asyncio.to_thread(self._write, model)
        # Unless its bytes turned up meanwhile.
        self._shelved.setdefault(model.fingerprint, shelved)

    def _write(self, model: ModelFile) -> Shelved:
        shelved = Shelved(model, [])
        folder = self._store.root / "manifests"
        try:
            write_atomically(folder / f"{model.fingerprint}.manifest", shelved.manifest)
            by_age = sorted(folder.glob("*.manifest"), key=lambda path: path.stat().st_mtime_ns)
            for path in by_age[:-MAX_MANIFESTS]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a model's description could not be kept", reason=str(error))
        return shelved

    def _read(self, fingerprint: str) -> ModelFile | None:
        path: Path = self._store.root / "manifests" / f"{fingerprint}.manifest"
        try:
            return read_manifest(path.read_bytes(), fingerprint)
        except (OSError, ModelError):
            return None


async def _stated_sha256(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    """The sha256 that a hub states for a file; empty where it states none."""
    try:
        async with session.head(url, headers=headers, allow_redirects=False) as answer:
            tag = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag") or ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ""
    value = tag.removeprefix("W/").strip('"')
    return value if _SHA256.match(value) else ""


class _Patient:
    """A source that is asked again where it breaks off, from the byte that it came to."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """Raises SourceCut after ATTEMPTS in a row that brought nothing."""
        end, failures = offset + length, 0
        while offset < end:
            problem = SourceCut("the source ended early")
            try:
                async for chunk in self._source.read(file_index, offset, end - offset):
                    offset += len(chunk)
                    failures = 0
                    yield chunk
            except SourceCut as error:
                problem = error
            if offset < end:
                failures += 1
                if failures >= ATTEMPTS:
                    raise problem
                await asyncio.sleep(0.25 * 2**failures)
