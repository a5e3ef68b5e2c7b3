"""What the mesh is to serve: models asked for, further names, the default. Kept in the books, copied here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from meshnet.protocol.errors import ApiError
from meshnet.tracker.books.facade import Books
from meshnet.tracker.kept import KeptSetting

SETTING = "models"
MAX_MODELS = 256
MAX_ALIASES = 1_000


class Wish(msgspec.Struct, frozen=True):
    """A model that was asked for. `files`: where it lies on a hub; `asked_ms`: when, unix milliseconds."""

    model_id: str
    source: str
    fingerprint: str
    asked_ms: int
    files: tuple[str, ...] = ()


class Kept(msgspec.Struct, frozen=True):
    """`off` are models that nodes hold and the mesh is not to place; `aliases` lead from names to ids."""

    models: dict[str, Wish] = {}
    aliases: dict[str, str] = {}
    default: str = ""
    off: tuple[str, ...] = ()


class Wishes:
    """A copy in memory, see kept.py."""

    def __init__(self, books: Books) -> None:
        self.kept = Kept()
        self._listeners: list[Callable[[], None]] = []
        self._setting = KeptSetting[Kept](
            books,
            SETTING,
            "the models asked for",
            read=lambda value: msgspec.convert(value, Kept),
            plain=msgspec.to_builtins,
            take=self._take,
        )

    async def start(self) -> None:
        await self._setting.start()

    async def stop(self) -> None:
        await self._setting.stop()

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener()` after each change, here or at another tracker."""
        self._listeners.append(listener)

    async def load(self, wish: Wish) -> None:
        """The mesh is to serve a model. Raises ApiError."""

        def change(kept: Kept) -> Kept:
            models = {**kept.models, wish.model_id: wish}
            if len(models) > MAX_MODELS:
                raise ApiError(400, f"a mesh is asked for at most {MAX_MODELS} models", param="model")
            off = tuple(each for each in kept.off if each != wish.model_id)
            return msgspec.structs.replace(kept, models=models, off=off)

        await self._setting.change(change)

    async def unload(self, model_id: str) -> None:
        """The mesh is not to place a model any more. Raises ApiError."""

        def change(kept: Kept) -> Kept:
            models = {name: wish for name, wish in kept.models.items() if name != model_id}
            off = tuple(dict.fromkeys([*kept.off, model_id]))[-MAX_MODELS:]
            default = "" if kept.default == model_id else kept.default
            return msgspec.structs.replace(kept, models=models, off=off, default=default)

        await self._setting.change(change)

    async def set_default(self, model_id: str) -> None:
        """The model of clients without a wish; empty: the first that is complete. Raises ApiError."""
        await self._setting.change(lambda kept: msgspec.structs.replace(kept, default=model_id))

    async def set_alias(self, alias: str, model_id: str) -> None:
        """A further name for a model; an empty id forgets the name. Raises ApiError."""

        def change(kept: Kept) -> Kept:
            aliases = {name: to for name, to in kept.aliases.items() if name != alias}
            if model_id:
                aliases[alias] = model_id
            elif alias not in kept.aliases:
                raise ApiError(404, f"there is no alias {alias[:100]!r}", code="unknown_alias", param="alias")
            if len(aliases) > MAX_ALIASES:
                raise ApiError(400, f"a mesh has at most {MAX_ALIASES} aliases", param="alias")
            return msgspec.structs.replace(kept, aliases=aliases)

        await self._setting.change(change)

    def _take(self, fresh: Kept) -> None:
        if fresh != self.kept:
            self.kept = fresh
            for listener in self._listeners:
                listener()
