"""The API of the mesh's models: load, unload, default, aliases, and where they are placed."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshnet.protocol.errors import ApiError
from meshnet.tracker import forms
from meshnet.tracker.answers import Tracker, answer, key_of
from meshnet.tracker.auth import require_admin
from meshnet.tracker.forms import read_form
from meshnet.tracker.previews import find_model


class Collection:
    """All of it needs an admin key."""

    def __init__(self, tracker: Tracker) -> None:
        self.t = tracker

    def routes(self) -> list[Route]:
        return [
            Route("/api/models", self.load, methods=["POST"]),
            Route("/api/models/default", self.set_default, methods=["PUT"]),
            Route("/api/models/aliases/{alias:path}", self.set_alias, methods=["PUT"]),
            Route("/api/models/aliases/{alias:path}", self.drop_alias, methods=["DELETE"]),
            Route("/api/models/{model:path}", self.unload, methods=["DELETE"]),
            Route("/api/placement", self.placement, methods=["GET"]),
            Route("/api/placement", self.place_again, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Answers at once; `GET /api/placement` tells how far it is."""
        require_admin(key_of(request))
        form = await read_form(request, forms.LoadModelForm, needed=True)
        wanted = form.model.strip()
        if not wanted or not wanted.isprintable():
            raise ApiError(
                400,
                "model must be a name, a path on the tracker's machine or hf:ORG/REPO/FILE.gguf",
                code="invalid_value",
                param="model",
            )
        return answer({"id": self.t.steward.load(wanted)}, 202)

    async def unload(self, request: Request) -> Response:
        require_admin(key_of(request))
        name = str(request.path_params["model"])
        kept = self.t.wishes.kept
        known = self.t.shelf.find(name)
        model_id = known.model_id if known is not None else kept.aliases.get(name.lower(), name.lower())
        if known is None and model_id not in kept.models:
            if self.t.steward.forget(name):
                return answer({"id": name, "held_by": []})
            raise ApiError(
                404, f"The model '{name[:100]}' is not in the mesh.", code="model_not_found", param="model"
            )
        own = [
            node.name
            for node in self.t.roster.state.nodes.values()
            if node.connected
            and not node.placement_wanted
            and any(shard.model == model_id for shard in node.shards)
        ]
        await self.t.steward.unload(model_id)
        return answer({"id": model_id, "held_by": sorted(own)})

    async def set_default(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.DefaultModelForm)
        model_id = find_model(self.t.shelf, form.model) if form.model else ""
        await self.t.wishes.set_default(model_id)
        return answer({"default": self.t.shelf.default_id()})

    async def set_alias(self, request: Request) -> Response:
        require_admin(key_of(request))
        alias = self._alias(request)
        form = await read_form(request, forms.AliasForm, needed=True)
        if alias in self.t.shelf.models():
            raise ApiError(
                409, f"{alias!r} is the id of a model; take another name", code="name_taken", param="alias"
            )
        wanted = form.model.lower()
        model_id = wanted if wanted in self.t.wishes.kept.models else find_model(self.t.shelf, form.model)
        await self.t.wishes.set_alias(alias, model_id)
        return answer({"alias": alias, "model": model_id})

    async def drop_alias(self, request: Request) -> Response:
        require_admin(key_of(request))
        alias = self._alias(request)
        await self.t.wishes.set_alias(alias, "")
        return answer({"alias": alias, "model": None})

    @staticmethod
    def _alias(request: Request) -> str:
        alias = str(request.path_params["alias"]).strip().lower()
        if not 1 <= len(alias) <= 128 or not alias.isprintable() or any(c in alias for c in ' ,"<>'):
            raise ApiError(
                400,
                "an alias has 1 to 128 printable characters without spaces, commas, quotes, < and >",
                code="invalid_value",
                param="alias",
            )
        return alias

    async def placement(self, request: Request) -> Response:
        require_admin(key_of(request))
        return answer(self._view())

    async def place_again(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.PlaceAgainForm)
        self.t.steward.replace(find_model(self.t.shelf, form.model))
        return answer(self._view(), 202)

    def _view(self) -> dict[str, Any]:
        kept = self.t.wishes.kept
        return {
            **self.t.steward.view(),
            "default": self.t.shelf.default_id(),
            "aliases": dict(sorted(kept.aliases.items())),
        }
