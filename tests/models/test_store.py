"""The store: its index, its cache of slices, and several processes at it at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshnet.models.errors import LayersOutside, ModelError, ModelNotFound, NotGGUF, StoreFull, TruncatedGGUF
from meshnet.models.fingerprint import fingerprint
from meshnet.models.gguf import ModelFile
from meshnet.models.locks import FileLock
from meshnet.models.slice import plan_slice, write_slice
from meshnet.models.store import Store

RandomModel = Callable[..., Path]
MB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def model_file(tmp_path: Path, random_models: RandomModel) -> Path:
    path = tmp_path / "My Model (Q8).gguf"
    shutil.copy(random_models("qwen2"), path)
    return path


def test_known_model_and_its_alias(store: Store) -> None:
    entry = store.pull("smollm2")
    assert (entry.id, entry.aliases) == ("smollm2-135m-instruct", ("smollm2",))
    assert store.pull("SmolLM2-135M-Instruct") == entry
    for name in ("smollm2", "SMOLLM2", "SmolLM2-135M-instruct"):
        assert store.resolve(name) == entry
    assert store.ls() == [entry]
    assert store.open("smollm2").n_layers == 30


def test_a_path_stays_where_it_is(store: Store, model_file: Path) -> None:
    entry = store.pull(str(model_file))
    assert (entry.id, entry.path) == ("my-model-q8", model_file)
    assert store.pull(str(model_file)) == entry
    assert store.pull("my-model-q8") == entry
    assert len(store.ls()) == 1
    assert Store(store.root).resolve("MY-model-q8") == entry


def test_two_files_of_one_name_get_two_ids(store: Store, model_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / model_file.name
    other.parent.mkdir()
    data = bytearray(model_file.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    ids = [store.pull(str(path)).id for path in (model_file, other, model_file, other)]
    assert ids == ["my-model-q8", "my-model-q8-2", "my-model-q8", "my-model-q8-2"]


def test_a_copy_of_a_file_is_the_same_model(store: Store, model_file: Path, tmp_path: Path) -> None:
    entry = store.pull(str(model_file))
    copy = tmp_path / "elsewhere" / model_file.name
    copy.parent.mkdir()
    shutil.copy(model_file, copy)
    assert store.pull(str(copy)) == entry
    assert store.ls() == [entry]


def test_a_file_that_moved_keeps_the_models_id(store: Store, model_file: Path, tmp_path: Path) -> None:
    store.pull(str(model_file))
    moved = tmp_path / "elsewhere" / model_file.name
    moved.parent.mkdir()
    model_file.rename(moved)
    assert store.pull(str(moved)).id == "my-model-q8"
    assert [model.path for model in store.ls()] == [moved]


def test_a_path_resolves_without_being_pulled(store: Store, model_file: Path) -> None:
    assert store.resolve(str(model_file)).path == model_file
    assert store.ls() == []


def test_unknown_and_gone(store: Store, model_file: Path) -> None:
    with pytest.raises(
        ModelNotFound, match=r"no model 'llama9' here \(there are: none\); run: meshnet model pull"
    ):
        store.resolve("llama9")
    with pytest.raises(ModelNotFound, match="no such file, and no known model"):
        store.pull("llama9")
    store.pull(str(model_file))
    model_file.unlink()
    with pytest.raises(ModelNotFound, match="has gone; run: meshnet model pull"):
        store.resolve("my-model-q8")


def test_bad_files_are_not_taken_in(store: Store, tmp_path: Path, model_file: Path) -> None:
    note = tmp_path / "note.gguf"
    note.write_text("no model")
    with pytest.raises(NotGGUF):
        store.pull(str(note))
    note.write_bytes(model_file.read_bytes()[:-100])
    with pytest.raises(TruncatedGGUF):
        store.pull(str(note))
    write_slice(plan_slice(ModelFile.open(model_file), 0, 2), note)
    with pytest.raises(ModelError, match="is a slice of a model"):
        store.pull(str(note))
    assert store.ls() == []


def test_a_damaged_index_says_so(store: Store) -> None:
    store.root.mkdir(parents=True)
    (store.root / "index.json").write_text("{")
    with pytest.raises(ModelError, match=r"damaged .* delete it and pull the models again"):
        store.ls()


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("MESHNET_SHARD_BYTES", "1000")
    store = Store()
    assert (store.root, store.cache.limit_bytes) == (tmp_path / "here", 1000)
    monkeypatch.setenv("MESHNET_SHARD_BYTES", "much")
    with pytest.raises(ModelError, match="MESHNET_SHARD_BYTES is 'much'"):
        Store()


def test_shards_are_made_once(store: Store, model_file: Path) -> None:
    model = ModelFile.open(model_file)
    path = store.shard(model, 2, 5)
    shard = ModelFile.open(path)
    assert shard.shard_range == (2, 5)
    assert shard.fingerprint == fingerprint(model).value
    before = path.stat().st_mtime_ns
    assert store.shard(model, 2, 5) == path
    assert path.stat().st_mtime_ns == before
    assert store.shard(model, 0, 7) == model_file, "all layers need no copy"
    with pytest.raises(LayersOutside):
        store.shard(model, 5, 8)


def test_another_model_is_another_shard(store: Store, random_models: RandomModel) -> None:
    one, two = (ModelFile.open(random_models("qwen2", seed=seed)) for seed in (0, 1))
    assert store.shard(one, 0, 3) != store.shard(two, 0, 3)


def test_the_longest_unused_goes_first(tmp_path: Path, model_file: Path) -> None:
    model = ModelFile.open(model_file)
    size = plan_slice(model, 2, 2).copy_bytes + 8192
    store = Store(tmp_path / "store", max_shard_bytes=3 * size + size // 2)
    paths = [store.shard(model, layer, layer) for layer in (1, 2, 3)]
    for path in paths:
        store.release(path)
    assert store.shard(model, 1, 1) == paths[0]  # now the latest used
    store.release(paths[0])
    fourth = store.shard(model, 4, 4)
    assert [path.exists() for path in (*paths, fourth)] == [True, False, True, True]
    assert [shard.path for shard in store.shards()] == [paths[2], paths[0], fourth]
    locks = {shard.path.with_suffix(".lock") for shard in store.shards()}
    assert set(fourth.parent.glob("*.lock")) - {fourth.parent / ".room.lock"} == locks


def test_what_is_in_use_stays(tmp_path: Path, model_file: Path) -> None:
    model = ModelFile.open(model_file)
    size = plan_slice(model, 2, 2).copy_bytes + 8192
    mine, other = (Store(tmp_path / "store", max_shard_bytes=2 * size + size // 2) for _ in range(2))
    held = [mine.shard(model, layer, layer) for layer in (1, 2)]
    assert mine.shard(model, 1, 1) == held[0]
    with pytest.raises(StoreFull, match="in use by running nodes"):
        other.shard(model, 3, 3)
    mine.release(held[0])  # held twice: still in use
    with pytest.raises(StoreFull):
        other.shard(model, 3, 3)
    mine.release(held[0])
    third = other.shard(model, 3, 3)
    assert [path.exists() for path in (*held, third)] == [False, True, True]
    mine.close()
    other.shard(model, 4, 4)
    assert not held[1].exists()


def test_unfinished_work_makes_room(tmp_path: Path, model_file: Path) -> None:
    """What a killed writer or a broken fetch left does not fill the store for ever."""
    model = ModelFile.open(model_file)
    size = plan_slice(model, 2, 2).copy_bytes + 8192
    store = Store(tmp_path / "store", max_shard_bytes=size + size // 2)
    print_ = fingerprint(model).value
    mine, other = (store.cache.path_of(print_, layer, layer) for layer in (2, 3))
    mine.parent.mkdir(parents=True)
    left = [mine.with_name(f".{mine.name}.abc.part"), other.with_name(f".{other.name}.part")]
    left.append(other.with_name(f".{other.name}.part.json"))
    for path in left:
        path.write_bytes(bytes(size // 2 + 8192))
    assert store.shard(model, 2, 2) == mine
    assert not any(path.exists() for path in left)


def test_larger_than_the_store(tmp_path: Path, model_file: Path) -> None:
    store = Store(tmp_path / "store", max_shard_bytes=1000)
    with pytest.raises(StoreFull, match="larger than the limit of 1000"):
        store.shard(ModelFile.open(model_file), 1, 2)


def test_a_full_disk(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    monkeypatch.setattr("meshnet.models.shards.SPARE_DISK_BYTES", 1 << 60)
    with pytest.raises(StoreFull, match="set MESHNET_CACHE to another disk"):
        store.shard(ModelFile.open(model_file), 1, 2)


def run_processes(script: str, arguments: list[tuple[object, ...]]) -> list[str]:
    """The first line that each of several processes, started together, prints; they end when all have."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for given in arguments
    ]
    said = [process.stdout.readline() for process in running if process.stdout]
    for process in running:
        process.communicate(timeout=60)
    assert all(process.returncode == 0 for process in running)
    return said


_MAKE = """
import sys, time
from pathlib import Path
from meshnet.models.store import Store
from meshnet.models.gguf import ModelFile
store, model = Store(Path(sys.argv[1])), ModelFile.open(sys.argv[2])
time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
status = store.shard(model, 2, 5).stat()
print(status.st_ino, status.st_mtime_ns, flush=True)
sys.stdin.read()  # goes on using it until all have it
"""


def test_many_processes_make_one_shard(tmp_path: Path, model_file: Path) -> None:
    made = run_processes(_MAKE, [(tmp_path / "store", model_file, time.time() + 1.5)] * 4)
    assert len(set(made)) == 1
    leftovers = [path.name for path in (tmp_path / "store" / "shards").iterdir() if ".part" in path.name]
    assert leftovers == []


def test_many_threads_make_one_shard(store: Store, model_file: Path) -> None:
    model, made = ModelFile.open(model_file), []
    threads = [threading.Thread(target=lambda: made.append(store.shard(model, 2, 5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert len(made) == 4


_HOLD = """
import sys, time
from pathlib import Path
from meshnet.models.store import Store
from meshnet.models.gguf import ModelFile
store = Store(Path(sys.argv[1]))
print(store.shard(ModelFile.open(sys.argv[2]), 1, 1), flush=True)
time.sleep(60)
"""


def test_a_killed_process_holds_nothing(tmp_path: Path, model_file: Path) -> None:
    model = ModelFile.open(model_file)
    size = plan_slice(model, 2, 2).copy_bytes + 8192
    store = Store(tmp_path / "store", max_shard_bytes=size + size // 2)
    command = [sys.executable, "-c", _HOLD, str(store.root), str(model_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        held = Path(other.stdout.readline().strip())
        with pytest.raises(StoreFull):
            store.shard(model, 2, 2)
        other.kill()
    assert held.exists()
    store.shard(model, 2, 2)
    assert not held.exists()


_PULL = """
import sys
from pathlib import Path
from meshnet.models.store import Store
print(*(Store(Path(sys.argv[1])).pull(file).id for file in sys.argv[2:]))
"""


def test_many_processes_write_one_index(tmp_path: Path, model_file: Path) -> None:
    files = [tmp_path / f"m{number}.gguf" for number in range(9)]
    for file in files:
        os.link(model_file, file)
    said = run_processes(_PULL, [(tmp_path / "store", *files[start::3]) for start in range(3)])
    expected = [file.stem for file in files]
    assert sorted("".join(said).split()) == expected
    assert [entry.id for entry in Store(tmp_path / "store").ls()] == expected


async def test_fetched_shards_are_kept_like_made_ones(store: Store, model_file: Path) -> None:
    model = store.identified(ModelFile.open(model_file))
    remote = ModelFile.from_manifest(model.to_manifest())
    plan, calls = plan_slice(remote, 2, 5), 0

    async def fetch(path: Path) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.2)
        write_slice(plan_slice(model, 2, 5), path)

    paths = await asyncio.gather(*(store.fetch_shard(plan, fetch) for _ in range(3)))
    assert len(set(paths)) == 1
    assert calls == 1
    assert store.shard(model, 2, 5) == paths[0]
    with pytest.raises(ModelError, match="fingerprint is not known"):
        await store.fetch_shard(plan_slice(ModelFile.open(model_file), 2, 5), fetch)


async def test_a_failed_fetch_leaves_the_place_free(store: Store, model_file: Path) -> None:
    model = store.identified(ModelFile.open(model_file))
    plan = plan_slice(model, 2, 5)

    async def fail(path: Path) -> None:
        raise ModelError("the source has gone")

    async def succeed(path: Path) -> None:
        write_slice(plan, path)

    with pytest.raises(ModelError, match="the source has gone"):
        await store.fetch_shard(plan, fail)
    assert (await store.fetch_shard(plan, succeed)).exists()


def test_locks(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first, second = (FileLock.attempt(path, shared=True) for _ in range(2))
    assert first is not None
    assert second is not None
    assert FileLock.attempt(path) is None
    first.release()
    first.release()
    second.release()
    alone = FileLock.attempt(path)
    assert alone is not None
    assert FileLock.attempt(path, shared=True) is None
    path.unlink()  # as the remover of a slice does: those who wait must not get a lock on a file that is gone
    got: list[FileLock] = []
    waiter = threading.Thread(target=lambda: got.append(FileLock.take(path)))
    waiter.start()
    alone.release()
    waiter.join(10)
    assert got
    assert path.exists()
    got[0].release()
