"""Brings weights to this node by range: from its own slices, from other nodes, the tracker, a hub."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from meshnet.models.errors import FetchFailed, ModelError
from meshnet.models.gguf import ModelFile
from meshnet.models.origins import Origin, Origins, spans_of
from meshnet.models.pulls import hub_headers
from meshnet.models.remote import FetchProgress, RateLimit, fetch_slice
from meshnet.models.serving import PATH, read_spans
from meshnet.models.slice import SlicePlan, plan_slice
from meshnet.models.sources import SliceSource
from meshnet.models.store import Store
from meshnet.protocol.passes import PASS_HEADER

if TYPE_CHECKING:
    # Most nodes never fetch anything, and aiohttp takes 17 MB: it is imported where it is used.
    import aiohttp

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


def slice_origin(held: Slice) -> Origin:
    """A slice that is here as a source of the bytes that it has."""
    plan, path = held
    return Origin(path.name, SliceSource(plan, path), spans_of(plan.pieces))


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

    @staticmethod
    def prepare() -> None:
        """Blocks. Imports what fetching needs, for a node that is going to fetch: it takes 0.1 s."""
        importlib.import_module("meshnet.models.http")

    async def describe(self, fingerprint: str, sources: WeightSources) -> ModelFile:
        """The model as a manifest tells it, which must give the fingerprint. Raises ModelError."""
        import aiohttp

        from meshnet.models.http import fetch_manifest

        problem: Exception = FetchFailed("no machine of the mesh was named that knows the model")
        async with self._mesh_session() as session:
            for base in sources.bases:
                try:
                    return await fetch_manifest(session, base, fingerprint, sources.headers, _patience())
                except (ModelError, aiohttp.ClientError, TimeoutError, OSError) as error:
                    log.warning("no manifest", source=base, reason=str(error) or type(error).__name__)
                    problem = error
        raise FetchFailed(f"the model's manifest could not be had: {problem}") from problem

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
        here = list(own)

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
                            mine = Origins(here, using)
                            origins = mine if not mine.missing(plan) else None
                        if origins is None or origins.missing(plan):
                            origins = Origins([*here, *await self._distant(stack, model, sources)], using)

                        def told(progress: FetchProgress) -> None:
                            report(Fetching(before + progress.done, total, progress.bytes_per_s, source))

                        await fetch_slice(
                            plan, origins, path, report=told, limit=self._limit, blame=origins.blame
                        )

                    brought = plan, await self._store.fetch_shard(plan, fetch)
                    files.append(brought)
                    done += plan.copy_bytes
                    # Segments may share tensors, as the first and the last one of a model with a tied matrix.
                    here.insert(0, slice_origin(brought))
                    if origins is not None:
                        origins.origins.insert(0, here[0])
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

        from meshnet.models.http import HttpSource, get_bounded

        mesh = await stack.enter_async_context(self._mesh_session())
        count = len(model.files)

        async def ask(base: str) -> Origin | None:
            where = f"{base}{PATH}/{model.fingerprint}"
            try:
                held = await get_bounded(mesh, f"{where}/held", sources.headers, _patience(), MAX_SPANS_BYTES)
                spans = read_spans(held)
            except (ModelError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("no weights", source=base, reason=str(error) or type(error).__name__)
                return None
            urls = [f"{where}/files/{index}" for index in range(count)]
            return Origin(base, HttpSource(mesh, urls, sources.headers, redirects=False), spans)

        # All at once: one that does not answer costs no more than its own time.
        answers = await asyncio.gather(*map(ask, sources.bases))
        found = [origin for origin in answers if origin is not None and origin.spans]
        if len(sources.files) == count:
            hub = await stack.enter_async_context(aiohttp.ClientSession())
            found.append(Origin(sources.files[0], HttpSource(hub, sources.files, hub_headers(sources.files))))
        return found


def _open_session() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession()


def _patience() -> aiohttp.ClientTimeout:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S)
