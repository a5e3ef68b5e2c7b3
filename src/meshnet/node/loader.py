"""Loads and unloads shards: the only module that makes engines, and what the node announces of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from meshnet.engine.base import EngineError, SelfTest
from meshnet.engine.llama import LlamaEngine
from meshnet.engine.memory import check_memory, memory_need
from meshnet.engine.shards import segment_borders
from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile
from meshnet.models.origins import Origin
from meshnet.models.serving import Shelved
from meshnet.models.sources import LocalSource
from meshnet.models.store import Store
from meshnet.node.fetching import Fetcher, Fetching, Slice, WeightSources, slice_origin
from meshnet.node.headmodel import HeadModel
from meshnet.node.health import capacity_score
from meshnet.node.limits import available_memory, give_back_memory, usable_cores
from meshnet.node.ring import DEFAULT_BYTES
from meshnet.node.sessions import Shard
from meshnet.node.stages import Stages
from meshnet.protocol import membership_pb2 as pb

DEFAULT_SLOTS = 16
DEFAULT_CTX = 4096
DRAIN_POLL_S = 0.05
TELL_S = 0.5
"""Between reports of how far a fetch is."""
FETCH_PART = 0.9
"""Of a shard's progress, where its bytes have to be fetched."""

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How shards are loaded. `n_ctx` None: the model's own, 4,096 at most. `memory` in bytes."""

    threads: int | None = None
    cores: tuple[int, ...] = ()
    device: str = "auto"
    gpu_layers: int = 0
    repack: bool = False
    n_ctx: int | None = None
    n_slots: int = DEFAULT_SLOTS
    memory: int | None = None
    replay_buffer: int = DEFAULT_BYTES
    """Bytes of sent hidden states that are kept; they count as the node's memory."""

    def context(self, model: ModelFile) -> int:
        return self.n_ctx or min(model.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX)


@dataclass(slots=True)
class Holding:
    """One shard that the node is to have: what it is, and how far it is."""

    model_id: str
    model: ModelFile
    first: int
    last: int
    cuts: frozenset[int]
    aliases: tuple[str, ...] = ()
    state: str = "loading"
    progress: float = 0.0
    error: str = ""
    shard: Shard | None = None
    wanted: frozenset[int] = field(default_factory=frozenset)
    """Cuts to load with next."""
    sources: WeightSources = field(default_factory=WeightSources)
    """Where its bytes come from when the model's file is not on this machine."""
    slices: list[Slice] = field(default_factory=list)
    """Then: what was brought, held in the store."""
    fetching: Fetching | None = None


class LoadError(Exception):
    """A shard cannot be loaded; the message says why."""


def parse_layers(text: str, n_layers: int | None = None) -> list[tuple[int, int]]:
    """`"0-14,20-29"` as ranges, both ends inclusive; ranges that touch or overlap become one. Raises
    LoadError."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise LoadError(f"--layers: {part.strip()!r} is not of the form A-B, as in 0-14")
        a, b = int(first), int(last or first)
        if b < a:
            raise LoadError(f"--layers: {part.strip()} ends before it begins")
        if n_layers is not None and b >= n_layers:
            raise LoadError(
                f"--layers: {part.strip()} is outside the model, which has layers 0-{n_layers - 1}"
            )
        ranges.append((a, b))
    merged: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if merged and a <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return merged


class Loader:
    """All shards of a node. `changed` is called when what is announced has changed."""

    def __init__(
        self,
        stages: Stages,
        store: Store,
        options: EngineOptions,
        changed: Callable[[], None],
        fetcher: Fetcher | None = None,
    ) -> None:
        self.holdings: list[Holding] = []
        self._stages = stages
        self._store = store
        self._fetcher = fetcher or Fetcher(store)
        self._shelved: dict[str, tuple[tuple[Slice, ...], Shelved]] = {}
        self._options = options
        self._changed = changed
        self._numbers = itertools.count()
        self._models: dict[int, HeadModel] = {}
        self._lock = asyncio.Lock()

    # ---------------------------------------------------------------- what is to be held

    def check(self, model: ModelFile, ranges: Sequence[tuple[int, int]]) -> None:
        """Raises LoadError when the shards do not fit the memory together, beside what is loaded."""
        left = self._memory_left()
        for first, last in ranges:
            need = memory_need(
                model, first, last, n_slots=self._options.n_slots, n_ctx=self._options.context(model)
            )
            try:
                check_memory(need, left, model.name, first, last)
            except EngineError as error:
                kept = f"{self._options.replay_buffer / 1e6:,.0f} MB are set aside by --replay-buffer"
                raise LoadError(f"{error} ({kept})") from error
            left -= need.total

    def _memory(self) -> int:
        """Bytes that shards may take, beside those that are loaded where the system tells what is free."""
        options = self._options
        have = options.memory if options.memory is not None else available_memory()
        return max(have - options.replay_buffer, 0)

    def _memory_left(self) -> int:
        """Bytes that further shards may take."""
        if self._options.memory is None:
            return self._memory()
        taken = sum(shard.info.memory_bytes for shard in self._stages.shards)
        return max(self._memory() - taken, 0)

    def add(
        self,
        model_id: str,
        model: ModelFile,
        first: int,
        last: int,
        cuts: Sequence[int],
        aliases: Sequence[str] = (),
        sources: WeightSources | None = None,
    ) -> Holding:
        """Takes a shard on; `load` loads it. `model` must know its fingerprint."""
        inside = frozenset(cut for cut in cuts if first < cut <= last)
        holding = Holding(
            model_id,
            model,
            first,
            last,
            inside,
            aliases=tuple(aliases),
            wanted=inside,
            sources=sources or WeightSources(),
        )
        self.holdings.append(holding)
        return holding

    def find(self, model_id: str, first: int, last: int) -> Holding | None:
        for holding in self.holdings:
            if (holding.model_id, holding.first, holding.last) == (model_id.lower(), first, last):
                return holding
        return None

    def head_model(self, shard: Shard) -> HeadModel:
        """Tokenizer and template of a head's model."""
        return self._models[shard.number]

    # ---------------------------------------------------------------- loading

    async def load(self, holding: Holding) -> None:
        """Brings a shard's bytes where they are not here, loads it, measures it and announces it. Raises
        LoadError."""
        holding.state, holding.progress, holding.error = "loading", 0.0, ""
        self._changed()
        try:
            holding.slices = await self._bring(holding)
            async with self._lock:
                if holding.wanted != holding.cuts:
                    await self._bring_anew(holding)
                shard, model = await self._make(holding, self._memory_left())
        except (EngineError, ModelError, OSError) as error:
            holding.state, holding.error = "failed", str(error)
            self._changed()
            raise LoadError(str(error)) from error
        self._install(holding, shard, model)

    async def _bring_anew(self, holding: Holding) -> None:
        """Brings the slices for other cuts, mostly from those that are here."""
        before = holding.slices
        holding.slices = await self._bring(holding)
        self._fetcher.release(before)

    async def _bring(self, holding: Holding) -> list[Slice]:
        """The slices that the shard is loaded from, with the cuts that are wanted now."""
        holding.cuts = holding.wanted
        if holding.model.is_local:
            return []
        model = holding.model
        borders = segment_borders(model, holding.first, holding.last, sorted(holding.cuts))
        holding.fetching = Fetching(0, 0, 0.0, "")
        told = 0.0

        def report(fetching: Fetching) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= TELL_S or fetching.done >= fetching.total:
                told = now
                self._fetched(holding, fetching)

        try:
            own = self._origins(model.fingerprint)
            return await self._fetcher.bring(model, borders, holding.sources, own, report)
        finally:
            holding.fetching = None

    def _fetched(self, holding: Holding, fetching: Fetching) -> None:
        holding.fetching = fetching
        holding.progress = FETCH_PART * fetching.done / max(fetching.total, 1)
        log.info(
            "fetching",
            model=holding.model_id,
            layers=f"{holding.first}-{holding.last}",
            done_mb=round(fetching.done / 1e6, 1),
            total_mb=round(fetching.total / 1e6, 1),
            mb_per_s=round(fetching.bytes_per_s / 1e6, 1),
            source=fetching.source,
        )
        self._changed()

    def _install(self, holding: Holding, shard: Shard, model: HeadModel | None) -> None:
        """The shard runs what comes from now on."""
        if model is not None:
            self._models[shard.number] = model
        holding.shard, holding.state, holding.progress = shard, "ready", 1.0
        # In front: of two shards with the same layers the new one takes what comes.
        self._stages.shards.insert(0, shard)
        self._stages.state.seed(shard)
        self._changed()
        log.info(
            "shard ready",
            model=holding.model_id,
            layers=f"{holding.first}-{holding.last}",
            entry_layers=list(shard.info.entry_layers),
            slots=shard.info.n_slots,
            context=shard.info.n_ctx,
            decode_ms_per_layer=round(shard.test.decode_ms_per_layer, 4),
            memory_mb=shard.info.memory_bytes >> 20,
            threads=shard.engine.describe().get("threads"),
        )

    async def _make(self, holding: Holding, memory: int) -> tuple[Shard, HeadModel | None]:
        """Loads and measures. Raises EngineError and ModelError."""
        options, loop = self._options, asyncio.get_running_loop()
        last_told = -1.0

        def progress(_what: str, fraction: float) -> None:
            nonlocal last_told
            if fraction - last_told >= 0.05:
                last_told = fraction
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._progressed, holding, fraction)

        def make() -> LlamaEngine:
            return LlamaEngine.load(
                holding.model,
                holding.first,
                holding.last,
                cuts=tuple(sorted(holding.cuts)),
                n_slots=options.n_slots,
                n_ctx=options.context(holding.model),
                threads=options.threads or (len(options.cores) or usable_cores()),
                cores=options.cores or None,
                gpu_layers=options.gpu_layers,
                device=options.device,
                repack=options.repack,
                memory_limit=memory,
                progress=progress,
                store=self._store,
            )

        # A thread of its own: loading takes long, and pins its thread to the cores of the compute threads.
        engine = await in_thread(make)
        test = await self._stages.executor.call(engine.self_test)
        shard = Shard(next(self._numbers), holding.model_id, engine, test)
        model = None
        if shard.info.is_head:
            file = None if holding.model.is_local else engine.files[0][2]
            model = await in_thread(
                lambda: HeadModel(holding.model_id, holding.model, holding.aliases, file=file)
            )
        return shard, model

    def _progressed(self, holding: Holding, fraction: float) -> None:
        holding.progress = fraction if holding.model.is_local else FETCH_PART + (1 - FETCH_PART) * fraction
        log.info(
            "loading",
            model=holding.model_id,
            layers=f"{holding.first}-{holding.last}",
            done=round(fraction, 2),
        )
        self._changed()

    # ---------------------------------------------------------------- changes

    async def use_cuts(self, model_id: str, cuts: Sequence[int]) -> None:
        """Reloads shards that lack an entry layer which the mesh uses, once nothing runs on them. Raises
        LoadError."""
        for holding in list(self.holdings):
            if holding.model_id != model_id.lower():
                continue
            inside = frozenset(cut for cut in cuts if holding.first < cut <= holding.last)
            holding.wanted = holding.cuts | inside
            if holding.wanted == holding.cuts:
                continue
            async with self._lock:
                # What was being loaded is loaded by now; what is still on its way will load with these.
                if holding.shard is not None and holding.wanted != holding.cuts:
                    await self._reload(holding)

    async def _reload(self, holding: Holding) -> None:
        """Loads a shard with other cuts: beside the old one where memory allows, so that calls can come all
        the while; else once nothing runs on it. Raises LoadError."""
        old = holding.shard
        assert old is not None
        need = memory_need(
            holding.model,
            holding.first,
            holding.last,
            n_slots=self._options.n_slots,
            n_ctx=self._options.context(holding.model),
        )
        beside = need.total <= self._memory_left()
        try:
            await self._bring_anew(holding)
            if not beside:
                await self._retire(holding)
                holding.state = "loading"
                self._changed()
            shard, model = await self._make(holding, self._memory_left())
        except (EngineError, ModelError, OSError) as error:
            if holding.shard is None:  # else the old one goes on
                holding.state, holding.error = "failed", str(error)
            holding.cuts = frozenset(old.info.entry_layers[1:])
            self._changed()
            raise LoadError(str(error)) from error
        self._install(holding, shard, model)
        if beside:
            await self._end(old)

    async def unload(self, holding: Holding) -> None:
        """Gives a shard up, once nothing runs on it."""
        async with self._lock:
            await self._retire(holding)
            self.drop(holding)

    def drop(self, holding: Holding) -> None:
        """Forgets a shard that is not loaded."""
        if holding in self.holdings:
            self.holdings.remove(holding)
        self._fetcher.release(holding.slices)
        holding.slices = []
        self._changed()

    async def _retire(self, holding: Holding) -> None:
        shard = holding.shard
        if shard is None:
            return
        holding.state = "draining"
        shard.accepts = False
        self._changed()
        await self._end(shard)
        holding.shard = None

    async def _end(self, shard: Shard) -> None:
        """Frees a shard once nothing runs on it."""
        shard.accepts = False
        while any(session.shard is shard for session in self._stages.sessions.values()):
            await asyncio.sleep(DRAIN_POLL_S)
        self._stages.shards.remove(shard)
        self._stages.drop_prefixes(shard)
        # Calls that went on to another shard, and prompts on their way, may still read by its vocabulary.
        self._models.pop(shard.number, None)
        await self._stages.executor.call(shard.engine.unload)
        await in_thread(give_back_memory)

    # ---------------------------------------------------------------- what others may read

    def shelved(self, fingerprint: str) -> Shelved | None:
        """What of a model's weights lies here."""
        held = [each for each in self.holdings if each.model.fingerprint == fingerprint]
        if not held:
            return None
        slices = tuple(piece for each in held for piece in each.slices)
        known = self._shelved.get(fingerprint)
        if known is None or known[0] != slices:
            whole = next((each.model for each in held if each.model.is_local), held[0].model)
            known = slices, Shelved(whole, self._origins(fingerprint))
            self._shelved[fingerprint] = known
        return known[1]

    def _origins(self, fingerprint: str) -> list[Origin]:
        """The model's bytes that are on this machine's disk and held by it."""
        found = []
        for holding in self.holdings:
            if holding.model.fingerprint != fingerprint:
                continue
            if holding.model.is_local:
                return [Origin("here", LocalSource(holding.model))]
            found += [slice_origin(each) for each in holding.slices]
        return found

    async def close(self) -> None:
        """Frees everything at once; nothing may run any more."""
        for holding in self.holdings:
            shard = holding.shard
            if shard is not None:
                holding.shard = None
                self._stages.shards.remove(shard)
                await self._stages.executor.call(shard.engine.unload)
        for model in self._models.values():
            model.close()
        self._models.clear()

    # ---------------------------------------------------------------- telling

    def announce(self, *, draining: bool) -> list[pb.Shard]:
        """All shards as the tracker is told of them."""
        return [self._announce(holding, draining=draining) for holding in self.holdings]

    def _announce(self, holding: Holding, *, draining: bool) -> pb.Shard:
        model, shard = holding.model, holding.shard
        told = pb.Shard(
            model=holding.model_id,
            fingerprint=model.fingerprint,
            arch=model.arch,
            start_layer=holding.first,
            end_layer=holding.last,
            model_layers=model.n_layers,
            entry_layers=sorted({holding.first, *holding.cuts}),
            n_slots=self._options.n_slots,
            n_ctx=self._options.context(model),
            n_embd=model.n_embd,
            state="draining" if draining and holding.state == "ready" else holding.state,
            progress=holding.progress,
            error=holding.error,
        )
        fetching = holding.fetching
        if fetching is not None:
            told.fetch.CopyFrom(
                pb.Fetch(
                    done_bytes=fetching.done,
                    total_bytes=fetching.total,
                    bytes_per_s=fetching.bytes_per_s,
                    source=fetching.source,
                )
            )
        if shard is not None:
            info, test = shard.info, shard.test
            told.entry_layers[:] = info.entry_layers
            told.mid_shard_entry = shard.mid_shard_entry
            told.n_slots, told.n_ctx = info.n_slots, info.n_ctx
            told.times.CopyFrom(times(test))
            told.capacity_score = capacity_score(info, test)
            told.numerics_class = info.numerics_class
            told.recurrent = info.recurrent
            told.memory_bytes = info.memory_bytes
            head = self._models.get(shard.number)
            if head is not None:
                told.card.CopyFrom(head.card())
                told.card.aliases[:] = holding.aliases
        return told


def times(test: SelfTest) -> pb.Times:
    """A self-test as it travels."""
    return pb.Times(
        decode_ms_per_layer=test.decode_ms_per_layer,
        prefill_ms_per_token_layer=test.prefill_ms_per_token_layer,
        embed_ms=test.embed_ms,
        output_ms=test.output_ms,
        batch_ms=test.batch_ms,
    )


async def in_thread(function: Callable[[], T]) -> T:
    """Runs a function in a thread that is used for nothing else."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, problem = None, None
        try:
            value = function()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=run, name="loader", daemon=True).start()
    return await future
