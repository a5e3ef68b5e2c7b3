"""The models of the mesh as clients see them: found by id or alias, kept until the mesh changes."""

from __future__ import annotations

from collections.abc import Mapping

from meshnet.protocol.tools import ToolFormat, detect_tool_format
from meshnet.tracker.catalogue import Model, build_models
from meshnet.tracker.roster import Roster


class Shelf:
    """`aliases` maps further names, in lower case, to model ids; they go before what heads announce."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._version = -1
        self._models: dict[str, Model] = {}
        self._formats: dict[str, ToolFormat | None] = {}
        self._announced: dict[str, str] = {}
        self.aliases: Mapping[str, str] = {}
        self.default: str = ""

    def models(self) -> dict[str, Model]:
        """All models by id. Do not change."""
        if self._version != self._roster.version:
            self._version = self._roster.version
            self._models = build_models(self._roster.state.nodes.values(), self._roster.clock())
            self._formats.clear()
            self._announced = {}
            for model_id, model in self._models.items():
                for alias in model.card.aliases:
                    self._announced.setdefault(alias, model_id)
        return self._models

    def find(self, name: str) -> Model | None:
        models = self.models()
        wanted = name.lower()
        target = self.aliases.get(wanted) or self._announced.get(wanted, "")
        return models.get(wanted) or models.get(target)

    def names(self, model: Model) -> list[str]:
        """The further names that lead to a model, set here or announced by its heads."""
        given = {alias for alias, target in self.aliases.items() if target == model.model_id}
        announced = {a for a in model.card.aliases if self.find(a) is model}
        return sorted(given | announced)

    def default_id(self) -> str:
        """The model that a client without a wish gets: as set, else the first complete one."""
        models = self.models()
        if self.default in models:
            return self.default
        complete = [model_id for model_id, model in models.items() if model.complete]
        return next(iter(complete or models), "")

    def tool_format(self, model: Model) -> ToolFormat | None:
        """How the model writes tool calls; None where its chat template has no tools."""
        if model.model_id not in self._formats:
            self._formats[model.model_id] = detect_tool_format(model.card.chat_template)
        return self._formats[model.model_id]
