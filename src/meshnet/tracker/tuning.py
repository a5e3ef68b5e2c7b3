"""What is set live through the API and kept in the books: cost model and weights, also per model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import msgspec

from meshnet.protocol.errors import ApiError
from meshnet.routing import RouteWeights
from meshnet.tracker.books.facade import Books
from meshnet.tracker.forms import RoutingForm, RoutingSettingsForm
from meshnet.tracker.kept import KeptSetting
from meshnet.tracker.planning import CostName, ModelRouting

SETTING = "routing"
MAX_MODELS = 1_000


class _Values(TypedDict, total=False):
    cost_model: CostName
    weights: dict[str, float]


class _Kept(msgspec.Struct, frozen=True):
    """The values that were set: for all models, and for single ones."""

    default: _Values = {}
    models: dict[str, _Values] = {}


class Tuning:
    """A copy in memory, for planning; see kept.py."""

    def __init__(self, books: Books) -> None:
        self._setting = KeptSetting[_Kept](
            books, SETTING, "the routing settings", read=_read, plain=msgspec.to_builtins, take=self._take
        )
        self._kept = _Kept()
        self._cache: dict[str, ModelRouting] = {}

    async def start(self) -> None:
        await self._setting.start()

    async def stop(self) -> None:
        await self._setting.stop()

    def of(self, model: str) -> ModelRouting:
        """How routes of a model are chosen now."""
        found = self._cache.get(model)
        if found is None:
            own = self._kept.models.get(model, _Values())
            found = self._cache[model] = _routing({**self._kept.default, **own})
        return found

    def view(self) -> dict[str, Any]:
        """`{"default": {"cost_model", "weights"}, "models": {id: {...}}}`."""
        return {
            "default": _plain(_routing(self._kept.default)),
            "models": {model: _plain(self.of(model)) for model in sorted(self._kept.models)},
        }

    async def change(self, change: RoutingSettingsForm, id_of: Callable[[str], str]) -> None:
        """Merges a change and keeps it. A model set to null forgets its own values. Raises ApiError.

        `id_of` gives the id of the model that a name stands for.
        """
        named = {id_of(name): values for name, values in change.models.items()}

        def merge(kept: _Kept) -> _Kept:
            models = {model: own for model, own in kept.models.items() if named.get(model, own) is not None}
            for model, values in named.items():
                if values is not None:
                    models[model] = _merged(models.get(model, _Values()), values)
            if len(models) > MAX_MODELS:
                raise ApiError(400, f"at most {MAX_MODELS} models have values of their own", param="models")
            return _Kept(_merged(kept.default, change.default), models)

        await self._setting.change(merge)

    def _take(self, fresh: _Kept) -> None:
        if fresh != self._kept:
            self._kept = fresh
            self._cache.clear()


def _read(value: Any) -> _Kept:
    """Raises ValueError."""
    kept = msgspec.convert(value, _Kept)
    for values in (kept.default, *kept.models.values()):
        _routing(values)
    return kept


def _routing(values: _Values) -> ModelRouting:
    weights = RouteWeights.from_dict(values.get("weights", {}))
    return ModelRouting(values.get("cost_model", "measured"), weights)


def _plain(routing: ModelRouting) -> dict[str, Any]:
    return {"cost_model": routing.cost_model, "weights": routing.weights.to_dict()}


def _merged(before: _Values, change: RoutingForm | None) -> _Values:
    """Values with a change merged in."""
    merged = _Values(**before)
    if change is not None:
        if change.cost_model is not None:
            merged["cost_model"] = change.cost_model
        if change.weights is not None:
            merged["weights"] = {**merged.get("weights", {}), **change.weights.named()}
    return merged
