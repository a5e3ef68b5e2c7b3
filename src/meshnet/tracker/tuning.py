"""What is set live through the API and kept in the books: cost model and weights, also per model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from meshnet.protocol.errors import ApiError
from meshnet.routing import RouteWeights
from meshnet.tracker.books.facade import Books
from meshnet.tracker.forms import RoutingForm, RoutingSettingsForm
from meshnet.tracker.kept import KeptSetting
from meshnet.tracker.planning import CostName, ModelRouting

SETTING = "routing"
MAX_MODELS = 1_000


class Tuning:
    """A copy in memory, for planning; see kept.py."""

    def __init__(self, books: Books) -> None:
        self._setting = KeptSetting(
            books,
            SETTING,
            "routing settings",
            lambda kept: self._take(kept.get("default", {}), kept.get("models", {})),
        )
        self._default: dict[str, Any] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._cache: dict[str, ModelRouting] = {}

    async def start(self) -> None:
        await self._setting.start()

    async def stop(self) -> None:
        await self._setting.stop()

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
        await self._setting.put({"default": default, "models": models})
        self._take(default, models)

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
