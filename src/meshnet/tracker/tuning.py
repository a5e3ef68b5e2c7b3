"""What is set live through the API and kept in the books: cost model and weights, also per model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import structlog

from meshnet.protocol.errors import ApiError
from meshnet.routing import RouteWeights
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import BooksError
from meshnet.tracker.forms import RoutingForm, RoutingSettingsForm
from meshnet.tracker.planning import CostName, ModelRouting

SETTING = "routing"
REFRESH_S = 1.0
MAX_MODELS = 1_000

log = structlog.get_logger("meshnet.tuning")


class Tuning:
    """A copy in memory, for planning; another tracker's change arrives within about two seconds."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._default: dict[str, Any] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._cache: dict[str, ModelRouting] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._load()
        self._refreshing = asyncio.create_task(self._refresh(), name="tuning-refresh")

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def of(self, model: str) -> ModelRouting:
        """How routes of a model are chosen now."""
        found = self._cache.get(model)
        if found is None:
            found = self._cache[model] = _routing({**self._default, **self._models.get(model, {})})
        return found

    def view(self) -> dict[str, Any]:
        """`{"default": {"cost_model", "weights"}, "models": {id: {...}}}`."""
        return {
            "default": _plain(_routing(self._default)),
            "models": {model: _plain(self.of(model)) for model in sorted(self._models)},
        }

    async def change(self, change: RoutingSettingsForm, id_of: Callable[[str], str]) -> None:
        """Merges a change and keeps it. A model set to null forgets its own values. Raises ApiError.

        `id_of` gives the id of the model that a name stands for.
        """
        default = _merged(self._default, change.default)
        models = dict(self._models)
        for name, values in change.models.items():
            model = id_of(name)
            if values is None:
                models.pop(model, None)
            else:
                models[model] = _merged(models.get(model, {}), values)
        if len(models) > MAX_MODELS:
            raise ApiError(400, f"at most {MAX_MODELS} models have values of their own", param="models")
        try:
            await self._books.settings.put(SETTING, {"default": default, "models": models})
        except BooksError as error:
            raise ApiError(error.status, error.message, code=error.code) from error
        self._take(default, models)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._load()
            except BooksError as error:
                log.warning("routing settings could not be read", error=error.message)

    async def _load(self) -> None:
        kept = await self._books.settings.get(SETTING, {})
        self._take(kept.get("default", {}), kept.get("models", {}))

    def _take(self, default: dict[str, Any], models: dict[str, dict[str, Any]]) -> None:
        if default != self._default or models != self._models:
            self._default, self._models = default, models
            self._cache.clear()


def _routing(values: Mapping[str, Any]) -> ModelRouting:
    return ModelRouting(
        cast(CostName, values.get("cost_model", "measured")),
        RouteWeights.from_dict(values.get("weights", {})),
    )


def _plain(routing: ModelRouting) -> dict[str, Any]:
    return {"cost_model": routing.cost_model, "weights": routing.weights.to_dict()}


def _merged(before: Mapping[str, Any], change: RoutingForm | None) -> dict[str, Any]:
    """Values with a change merged in."""
    merged = dict(before)
    if change is not None:
        if change.cost_model is not None:
            merged["cost_model"] = change.cost_model
        if change.weights is not None:
            merged["weights"] = {**merged.get("weights", {}), **change.weights.named()}
    return merged
