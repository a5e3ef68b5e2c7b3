"""Directives that take long: load, unload and other cuts, carried out one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from meshnet.engine.base import EngineError
from meshnet.models.errors import ModelError
from meshnet.models.store import Store
from meshnet.node.fetching import Fetcher, WeightSources
from meshnet.node.loader import Holding, Loader, LoadError, in_thread, parse_layers
from meshnet.protocol import membership_pb2 as pb

WAITING = 256

log = structlog.get_logger()


class Directives:
    """`base` gives the base URL of a source that a directive names, `done` tells the tracker what became of a
    directive: empty where it is carried out, else why not."""

    def __init__(
        self,
        loader: Loader,
        store: Store,
        fetcher: Fetcher,
        base: Callable[[str], str],
        done: Callable[[pb.Directive, str], None],
    ) -> None:
        self._loader = loader
        self._store = store
        self._fetcher = fetcher
        self._base = base
        self._done = done
        self._waiting: asyncio.Queue[pb.Directive] = asyncio.Queue(WAITING)
        self._loads: dict[int, asyncio.Task[None]] = {}

    def put(self, directive: pb.Directive) -> None:
        """Takes a directive on."""
        if directive.WhichOneof("kind") == "cuts":
            self._note_cuts(directive.cuts)
        try:
            self._waiting.put_nowait(directive)
        except asyncio.QueueFull:
            self._done(directive, "too many directives wait")

    async def stop(self) -> None:
        """Breaks off what is being loaded; what was fetched is kept."""
        for loading in self._loads.values():
            loading.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    def _note_cuts(self, cuts: pb.UseCuts) -> None:
        """Shards that are not loaded yet load with these cuts at once."""
        for holding in self._loader.holdings:
            if holding.shard is None and holding.model_id == cuts.model.lower():
                holding.wanted |= {cut for cut in cuts.cuts if holding.first < cut <= holding.last}

    async def run(self) -> None:
        """Carries them out, one after the other."""
        while True:
            directive = await self._waiting.get()
            try:
                await self._carry_out(directive)
            except (LoadError, ModelError, EngineError) as error:
                log.warning("directive failed", kind=directive.WhichOneof("kind"), reason=str(error))
                self._done(directive, str(error))
            except Exception as error:
                # One bad directive must not end the node.
                log.exception("directive failed", kind=directive.WhichOneof("kind"))
                self._done(directive, f"{type(error).__name__}: {error}")
            else:
                if directive.WhichOneof("kind") != "load":  # that one answers when it is loaded
                    self._done(directive, "")

    async def _carry_out(self, directive: pb.Directive) -> None:
        kind = directive.WhichOneof("kind")
        if kind == "cuts":
            await self._loader.use_cuts(directive.cuts.model, directive.cuts.cuts)
        elif kind == "unload":
            asked = directive.unload
            holding = self._loader.find(asked.model, asked.start_layer, asked.end_layer)
            if holding is None:
                raise LoadError(
                    f"no shard {asked.start_layer}-{asked.end_layer} of {asked.model} is loaded here"
                )
            loading = self._loads.get(id(holding))
            if loading is not None:
                if holding.fetching is not None:  # what the engine has begun cannot be broken off
                    loading.cancel()
                await asyncio.wait({loading})
            await self._loader.unload(holding)
        elif kind == "load":
            await self._load(directive)
        else:
            raise LoadError(f"this version does not know the directive {kind!r}")

    async def _load(self, directive: pb.Directive) -> None:
        """Takes a shard on; its bytes may be long on their way, so that other directives go on meanwhile."""
        asked = directive.load
        sources = WeightSources(tuple(map(self._base, asked.sources)), tuple(asked.files), asked.weights_pass)
        fingerprint = asked.fingerprint
        model = await in_thread(lambda: self._store.with_fingerprint(fingerprint, asked.model.lower()))
        if model is None:
            model = await self._fetcher.describe(fingerprint, sources)
        parse_layers(f"{asked.start_layer}-{asked.end_layer}", model.n_layers)
        held = self._loader.find(asked.model, asked.start_layer, asked.end_layer)
        if held is not None:
            if held.state != "failed":
                raise LoadError(f"layers {held.first}-{held.last} of {held.model_id} are held here already")
            self._loader.drop(held)
        self._loader.check(model, [(asked.start_layer, asked.end_layer)])
        holding = self._loader.add(
            asked.model.lower(),
            model,
            asked.start_layer,
            asked.end_layer,
            list(asked.cuts),
            list(asked.aliases),
            sources,
        )
        task = asyncio.create_task(self._finish_load(directive, holding), name="load")
        self._loads[id(holding)] = task
        task.add_done_callback(lambda _: self._loads.pop(id(holding), None))

    async def _finish_load(self, directive: pb.Directive, holding: Holding) -> None:
        try:
            await self._loader.load(holding)
        except LoadError as error:
            log.warning("directive failed", kind="load", reason=str(error))
            self._loader.drop(holding)
            self._done(directive, str(error))
        except Exception as error:
            # Nobody awaits this: without a word the shard would seem to be loading for ever.
            log.exception("load failed")
            self._loader.drop(holding)
            self._done(directive, f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            self._loader.drop(holding)
            raise
        else:
            self._done(directive, "")
