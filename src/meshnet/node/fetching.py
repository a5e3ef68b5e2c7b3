"""Brings weights to this node by range: from its own slices, from other nodes, the tracker, a hub."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from meshnet.models.errors import FetchFailed, HashMismatch, ModelError
from meshnet.models.fingerprint import verify
from meshnet.models.gguf import ModelFile
from meshnet.models.origins import Origin, Origins
from meshnet.models.remote import FetchProgress, RateLimit, fetch_slice
from meshnet.models.serving import PATH, read_bounded, read_spans
from meshnet.models.slice import SlicePlan, plan_slice
from meshnet.models.store import Store
from meshnet.protocol.passes import PASS_HEADER

if TYPE_CHECKING:
    # Most nodes never fetch anything, and aiohttp takes 17 MB: it is imported where it is used.
    import aiohttp

HUB = "https://huggingface.co"
CONNECT_S = 5.0
ANSWER_S = 30.0
MAX_SPANS_BYTES = 4 << 20

Slice = tuple[SlicePlan, Path]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WeightSources:
    """Where a model's bytes are: base URLs of the mesh's machines, then files on a hub, one per file of the
    model; `weights_pass` opens the former."""

    bases: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    weights_pass: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {PASS_HEADER: self.weights_pass}


@dataclass(frozen=True, slots=True)
class Fetching:
    """How far a shard's bytes are, all its segments together, and where they come from now."""

    done: int
    total: int
    bytes_per_s: float
    source: str


class Fetcher:
    """`mesh_session` opens sessions to machines of the mesh. `limit` is shared by all that is fetched."""

    def __init__(
        self,
        store: Store,
        mesh_session: Callable[[], aiohttp.ClientSession] | None = None,
        limit: RateLimit | None = None,
    ) -> None:
        self._store = store
        self._mesh_session = mesh_session or _open_session
        self._limit = limit

    async def describe(self, fingerprint: str, sources: WeightSources) -> ModelFile:
        """The model as a manifest tells it, which must give the fingerprint. Raises ModelError."""
        import aiohttp

        problem: Exception = FetchFailed("no machine of the mesh was named that knows the model")
        async with self._mesh_session() as session:
            for base in sources.bases:
                try:
                    return await self._describe(session, base, fingerprint, sources)
                except (ModelError, aiohttp.ClientError, TimeoutError, OSError) as error:
                    log.warning("no manifest", source=base, reason=str(error) or type(error).__name__)
                    problem = error
        raise FetchFailed(f"the model's manifest could not be had: {problem}") from problem

    async def _describe(
        self, session: aiohttp.ClientSession, base: str, fingerprint: str, sources: WeightSources
    ) -> ModelFile:
        data = await _get(session, f"{base}{PATH}/{fingerprint}", sources)
        model = ModelFile.from_manifest(data)
        if model.fingerprint != fingerprint:
            raise HashMismatch(f"{base} describes another model than was asked for")
        verify(model)
        return model

    async def bring(
        self,
        model: ModelFile,
        borders: Sequence[tuple[int, int]],
        sources: WeightSources,
        own: Sequence[Origin],
        report: Callable[[Fetching], None],
    ) -> list[Slice]:
        """Files with these ranges of layers, held in the store until they are released there.

        What `own` holds is copied, the rest is fetched. Raises ModelError; what was verified is kept.
        """
        plans = [plan_slice(model, first, last) for first, last in borders]
        total = sum(plan.copy_bytes for plan in plans)
        done, source = 0, ""
        files: list[Slice] = []

        def using(name: str) -> None:
            nonlocal source
            source = name

        try:
            async with contextlib.AsyncExitStack() as stack:
                origins: Origins | None = None
                for plan in plans:

                    async def fetch(path: Path, plan: SlicePlan = plan, before: int = done) -> None:
                        nonlocal origins
                        if origins is None:
                            mine = Origins(own, using)
                            origins = mine if not mine.missing(plan) else None
                        if origins is None or origins.missing(plan):
                            origins = Origins([*own, *await self._distant(stack, model, sources)], using)

                        def told(progress: FetchProgress) -> None:
                            report(Fetching(before + progress.done, total, progress.bytes_per_s, source))

                        await fetch_slice(
                            plan, origins, path, report=told, limit=self._limit, blame=origins.blame
                        )

                    files.append((plan, await self._store.fetch_shard(plan, fetch)))
                    done += plan.copy_bytes
        except BaseException:
            self.release(files)
            raise
        return files

    def release(self, slices: Sequence[Slice]) -> None:
        """Says that slices from `bring` are no longer used."""
        for _, path in slices:
            self._store.release(path)

    async def _distant(
        self, stack: contextlib.AsyncExitStack, model: ModelFile, sources: WeightSources
    ) -> list[Origin]:
        """The mesh's machines with what they hold, then the hub."""
        import aiohttp

        from meshnet.models.http import HttpSource

        found: list[Origin] = []
        mesh = await stack.enter_async_context(self._mesh_session())
        count = len(model.files)
        for base in sources.bases:
            where = f"{base}{PATH}/{model.fingerprint}"
            try:
                spans = read_spans(await _get(mesh, f"{where}/held", sources, MAX_SPANS_BYTES))
            except (ModelError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("no weights", source=base, reason=str(error) or type(error).__name__)
                continue
            if spans:
                urls = [f"{where}/files/{index}" for index in range(count)]
                found.append(Origin(base, HttpSource(mesh, urls, sources.headers, redirects=False), spans))
        if len(sources.files) == count:
            hub = await stack.enter_async_context(aiohttp.ClientSession())
            found.append(Origin(sources.files[0], HttpSource(hub, sources.files, hub_headers(sources.files))))
        return found


def _open_session() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession()


def hub_headers(files: Sequence[str]) -> dict[str, str]:
    """The hub's token, where the user has one: for the user's hub alone, whatever a directive names."""
    token = os.environ.get("HF_TOKEN", "")
    hub = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    own = all(file.startswith(f"{hub}/") for file in files)
    return {"authorization": f"Bearer {token}"} if token and own else {}


async def _get(
    session: aiohttp.ClientSession, url: str, sources: WeightSources, limit: int | None = None
) -> bytes:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S)
    async with session.get(url, headers=sources.headers, timeout=timeout, allow_redirects=False) as answer:
        if answer.status != 200:
            raise FetchFailed(f"{url}: answered {answer.status} {answer.reason or ''}".rstrip())
        chunks = answer.content.iter_chunked(1 << 20)
        return await (read_bounded(chunks) if limit is None else read_bounded(chunks, limit))
