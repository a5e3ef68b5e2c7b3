"""The models of the mesh as clients see them: found by id or alias, kept until the mesh changes."""

from __future__ import annotations

from collections.abc import Mapping

from meshnet.protocol.tools import ToolFormat, detect_tool_format
from meshnet.tracker.catalogue import Model, build_models
from meshnet.tracker.roster import Roster
from meshnet.tracker.wishes import Wishes


class Shelf:
    """The models of one mesh, counted anew when its nodes have changed."""

    def __init__(self, roster: Roster, wishes: Wishes | None = None) -> None:
        self._roster = roster
        self._wishes = wishes
        self.used_at: dict[str, float] = {}
        """When a model's last call came, by the roster's clock."""
        self._version = -1
        self._models: dict[str, Model] = {}
        self._formats: dict[str, ToolFormat | None] = {}
        self._announced: dict[str, str] = {}

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
        own = self._aliases().get(wanted, "")
        return models.get(wanted) or models.get(own) or models.get(self._announced.get(wanted, ""))

    def _aliases(self) -> Mapping[str, str]:
        return self._wishes.kept.aliases if self._wishes is not None else {}

    def use(self, model_id: str) -> None:
        """A call for the model came."""
        self.used_at[model_id] = self._roster.clock()

    def id_of(self, name: str) -> str:
        """The id of the model that a name leads to; of a model that is not there, the name in lower case."""
        model = self.find(name)
        return name.lower() if model is None else model.model_id

    def names(self, model: Model) -> list[str]:
        """The further names that lead to a model: given here, or announced by its heads."""
        given = [alias for alias, model_id in self._aliases().items() if model_id == model.model_id]
        return sorted({alias for alias in (*model.card.aliases, *given) if self.find(alias) is model})

    def default_id(self) -> str:
        """The model that a client without a wish gets: the one that was chosen, or the first complete one."""
        models = self.models()
        chosen = self._wishes.kept.default if self._wishes is not None else ""
        if chosen in models:
            return chosen
        complete = [model_id for model_id, model in models.items() if model.complete]
        return next(iter(complete or models), "")

    def tool_format(self, model: Model) -> ToolFormat | None:
        """How the model writes tool calls; None where its chat template has no tools."""
        if model.model_id not in self._formats:
            self._formats[model.model_id] = detect_tool_format(model.card.chat_template)
        return self._formats[model.model_id]
