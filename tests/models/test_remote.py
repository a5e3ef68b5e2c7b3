"""Fetching slices by range: from files, from a neighbour's slice, over HTTP; cut, damaged, slow, refused."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from support.hub import Hub, run_hub
from support.llama_c import Stage
from support.random_gguf import write_random_model

from meshnet.models.errors import FetchFailed, HashMismatch, MissingPart, ModelError, NotGGUF
from meshnet.models.fingerprint import combine, fingerprint, with_fingerprint
from meshnet.models.gguf import ModelFile
from meshnet.models.http import HttpSource, open_remote
from meshnet.models.metadata import FLOAT32, Metadata, scalar_entry
from meshnet.models.remote import (
    ByteSource,
    FetchProgress,
    RateLimit,
    RateMeter,
    SourceCut,
    fetch_slice,
    hash_source,
)
from meshnet.models.slice import SlicePlan, plan_slice, write_slice
from meshnet.models.sources import LocalSource, SliceSource

RandomModel = Callable[..., Path]


@pytest.fixture(scope="session")
def model(random_models: RandomModel) -> ModelFile:
    """A local model that knows its hashes."""
    found = ModelFile.open(random_models("llama", n_layers=8, quant="q8_0"))
    return with_fingerprint(found, fingerprint(found))


@pytest.fixture(scope="session")
def remote(model: ModelFile) -> ModelFile:
    """The same model, as a machine without the file knows it."""
    return ModelFile.from_manifest(model.to_manifest())


@pytest.fixture
def plan(remote: ModelFile) -> SlicePlan:
    return plan_slice(remote, 2, 4)


def expected(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> bytes:
    return write_slice(plan_slice(model, plan.first, plan.last), tmp_path / "expected.gguf").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def no_sleep(_: float) -> None:
    return None


class Broken:
    """A source that breaks off once it has sent so many bytes in all, once for each number in `cuts`."""

    def __init__(self, inner: ByteSource, cuts: list[int]) -> None:
        self.inner = inner
        self.cuts = cuts
        self.sent = 0
        self.resumed: list[int] = []
        """Where in all that was sent a request after a break began."""
        self._broken = False

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        if self._broken:
            self.resumed.append(self.sent)
        self._broken = False
        async for chunk in self.inner.read(file_index, offset, length):
            part = chunk[: self.cuts[0] - self.sent] if self.cuts else chunk
            self.sent += len(part)
            if part:
                yield part
            if self.cuts and self.sent >= self.cuts[0]:
                self.cuts.pop(0)
                self._broken = True
                raise SourceCut("cable pulled")


async def test_same_bytes_as_a_local_slice(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> None:
    seen: list[FetchProgress] = []
    out = await fetch_slice(plan, LocalSource(model), tmp_path / "f" / "s.gguf", report=seen.append)
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert names(out.parent) == ["s.gguf"]
    assert (seen[-1].done, seen[-1].total) == (plan.copy_bytes, plan.copy_bytes)
    assert seen[-1].bytes_per_s > 0
    with Stage(out, "l_out-2") as stage:
        assert stage.n_embd == 128


async def test_every_range_and_split_sources(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", "qwen3moe", split_tensors=30, n_layers=4)
    parts = ModelFile.open(path)
    parts = with_fingerprint(parts, fingerprint(parts))
    distant = ModelFile.from_manifest(parts.to_manifest())
    for first, last in ((0, 1), (1, 2), (2, 3), (0, 3)):
        wanted = plan_slice(distant, first, last)
        out = await fetch_slice(wanted, LocalSource(parts), tmp_path / "s.gguf")
        assert out.read_bytes() == expected(parts, wanted, tmp_path)


async def test_neighbour_with_a_slice_only(model: ModelFile, remote: ModelFile, tmp_path: Path) -> None:
    held = plan_slice(model, 1, 5)
    source = SliceSource(held, write_slice(held, tmp_path / "held.gguf"))
    wanted = plan_slice(remote, 2, 4)
    out = await fetch_slice(wanted, source, tmp_path / "s.gguf")
    assert out.read_bytes() == expected(model, wanted, tmp_path)
    first = held.pieces[0]
    assert source.holds(first.file_index, first.offset + 3, 5)
    with pytest.raises(ModelError, match=r"layers 1-5: does not hold bytes"):
        await fetch_slice(plan_slice(remote, 5, 6), source, tmp_path / "t.gguf")


async def test_goes_on_from_the_byte(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> None:
    source = Broken(LocalSource(model), [1000, 71_000, 71_001])
    out = await fetch_slice(plan, source, tmp_path / "s.gguf", sleep=no_sleep)
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert source.sent == plan.copy_bytes
    assert source.resumed == [1000, 71_000, 71_001]


async def test_the_next_call_keeps_what_is_verified(
    model: ModelFile, plan: SlicePlan, tmp_path: Path
) -> None:
    source = Broken(LocalSource(model), [150_000] * 6)
    with pytest.raises(FetchFailed, match=r"cable pulled; gave up after 6 attempts"):
        await fetch_slice(plan, source, tmp_path / "s.gguf", sleep=no_sleep)
    assert not (tmp_path / "s.gguf").exists()
    again = Broken(LocalSource(model), [])
    seen: list[FetchProgress] = []
    out = await fetch_slice(plan, again, tmp_path / "s.gguf", report=seen.append)
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert plan.copy_bytes - 150_000 <= again.sent < plan.copy_bytes - 100_000
    assert seen[0].done > 100_000
    assert names(tmp_path) == ["expected.gguf", "s.gguf"]


async def test_a_cancelled_fetch_can_go_on(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> None:
    class Stuck(Broken):
        async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
            async for chunk in self.inner.read(file_index, offset, length):
                yield chunk[:200_000]
                await asyncio.sleep(60)

    task = asyncio.ensure_future(fetch_slice(plan, Stuck(LocalSource(model), []), tmp_path / "s.gguf"))
    part = tmp_path / ".s.gguf.part"
    while not part.exists() or not part.read_bytes()[len(plan.header) :].strip(b"\0"):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = Broken(LocalSource(model), [])
    out = await fetch_slice(plan, again, tmp_path / "s.gguf")
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert again.sent < plan.copy_bytes


async def test_another_plan_starts_afresh(model: ModelFile, remote: ModelFile, tmp_path: Path) -> None:
    out = tmp_path / "s.gguf"
    with pytest.raises(FetchFailed):
        await fetch_slice(
            plan_slice(remote, 2, 4), Broken(LocalSource(model), [150_000] * 6), out, sleep=no_sleep
        )
    other = plan_slice(remote, 3, 5)
    await fetch_slice(other, LocalSource(model), out)
    assert out.read_bytes() == expected(model, other, tmp_path)


class Damaging:
    """A source that changes a byte in its first `times` answers."""

    def __init__(self, inner: ByteSource, times: int) -> None:
        self.inner = inner
        self.times = times

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        damage, self.times = self.times > 0, self.times - 1
        async for chunk in self.inner.read(file_index, offset, length):
            yield bytes([chunk[0] ^ 1]) + chunk[1:] if damage else chunk
            damage = False


async def test_damaged_bytes(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> None:
    out = await fetch_slice(plan, Damaging(LocalSource(model), 1), tmp_path / "s.gguf")
    assert out.read_bytes() == expected(model, plan, tmp_path)
    with pytest.raises(HashMismatch, match=r"rope_freqs\.weight arrived twice with a wrong hash"):
        await fetch_slice(plan, Damaging(LocalSource(model), 99), tmp_path / "t.gguf")
    assert not (tmp_path / "t.gguf").exists()


async def test_a_source_that_sends_too_much(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> None:
    class Generous(Broken):
        async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
            yield bytes(length + 1)

    with pytest.raises(FetchFailed, match="sends more than it was asked for"):
        await fetch_slice(plan, Generous(LocalSource(model), []), tmp_path / "s.gguf")


async def test_without_hashes_nothing_is_fetched(model: ModelFile, tmp_path: Path) -> None:
    unknown = ModelFile.open(model.path)
    with pytest.raises(HashMismatch, match=r"the hash of token_embd\.weight is not known"):
        await fetch_slice(plan_slice(unknown, 2, 4), LocalSource(model), tmp_path / "s.gguf")


async def test_a_manifest_that_was_changed(model: ModelFile, tmp_path: Path) -> None:
    """Another hash, another value in the metadata: neither gives the fingerprint that was asked for."""
    changed = [
        dataclasses.replace(
            model, tensor_hashes=(*model.tensor_hashes[:-1], (model.tensor_hashes[-1][0], "0" * 64))
        )
    ]
    entries = {**model.metadata.entries(), "llama.rope.freq_base": scalar_entry(FLOAT32, 5.0)}
    changed.append(dataclasses.replace(model, metadata=Metadata(entries)))
    for other in changed:
        distant = ModelFile.from_manifest(other.to_manifest())
        with pytest.raises(HashMismatch, match="does not give the fingerprint"):
            await fetch_slice(plan_slice(distant, 2, 4), LocalSource(model), tmp_path / "s.gguf")


async def test_rate_limit() -> None:
    now, slept = 0.0, 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now, slept
        now += seconds
        slept += seconds

    limit = RateLimit(1000, clock=lambda: now, sleep=sleep)
    for _ in range(10):
        await limit.spend(500)
    assert slept == pytest.approx(5.0)
    now += 100  # idle time is not saved up beyond a second
    for _ in range(4):
        await limit.spend(1000)
    assert slept == pytest.approx(8.0)
    with pytest.raises(ValueError, match="give a positive number"):
        RateLimit(0)


async def test_a_limited_fetch_takes_its_time(model: ModelFile, plan: SlicePlan, tmp_path: Path) -> None:
    started = time.monotonic()
    await fetch_slice(plan, LocalSource(model), tmp_path / "s.gguf", limit=RateLimit(plan.copy_bytes * 4))
    assert time.monotonic() - started >= 0.24


def test_rate_meter() -> None:
    now = 0.0
    meter = RateMeter(lambda: now)
    for _ in range(10):
        now += 1.0
        rate = meter.add(300)
    assert rate == pytest.approx(300)
    now += 10
    assert meter.add(0) < 100


async def test_local_source_keeps_to_its_files(model: ModelFile) -> None:
    source = LocalSource(model)
    for file_index, offset, length in ((0, model.n_bytes - 1, 2), (0, -1, 2), (1, 0, 1), (0, 0, -1)):
        with pytest.raises(ModelError, match="asked for"):
            async for _ in source.read(file_index, offset, length):
                pass


# over HTTP

REPO = "org/repo/m.gguf"


@pytest.fixture
def hub(model: ModelFile) -> Iterator[Hub]:
    with run_hub({REPO: model.path.read_bytes()}) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as running:
        yield running


def address(hub: Hub, name: str = "m.gguf") -> str:
    return f"{hub.url}/org/repo/resolve/main/{name}?sig=secret"


async def test_over_http(
    hub: Hub, session: aiohttp.ClientSession, model: ModelFile, plan: SlicePlan, tmp_path: Path
) -> None:
    hub.cut_after = [100_000, 5]
    hub.statuses = [503]
    out = await fetch_slice(plan, HttpSource(session, [address(hub)]), tmp_path / "s.gguf", sleep=no_sleep)
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert len(hub.ranges) <= 3 + 2 + len(plan.pieces) // 4, "adjoining tensors come in one request"


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "valid token"), (403, "valid token"), (404, "no such file"), (418, "answered 418")],
)
async def test_http_refusals(
    hub: Hub, session: aiohttp.ClientSession, plan: SlicePlan, tmp_path: Path, status: int, said: str
) -> None:
    hub.statuses = [status]
    with pytest.raises(FetchFailed, match=said) as caught:
        await fetch_slice(plan, HttpSource(session, [address(hub)]), tmp_path / "s.gguf", sleep=no_sleep)
    assert "secret" not in str(caught.value)


async def test_http_server_without_ranges(
    hub: Hub, session: aiohttp.ClientSession, plan: SlicePlan, tmp_path: Path
) -> None:
    hub.ignore_ranges = True
    with pytest.raises(FetchFailed, match="ignores byte ranges"):
        await fetch_slice(plan, HttpSource(session, [address(hub)]), tmp_path / "s.gguf", sleep=no_sleep)


async def test_http_server_that_is_not_there(
    session: aiohttp.ClientSession, plan: SlicePlan, tmp_path: Path
) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    source = HttpSource(session, ["http://127.0.0.1:1/m.gguf"])
    with pytest.raises(FetchFailed, match="gave up after 6 attempts"):
        await fetch_slice(plan, source, tmp_path / "s.gguf", sleep=note)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0]


async def test_a_model_that_is_on_no_disk_here(
    hub: Hub, session: aiohttp.ClientSession, model: ModelFile, tmp_path: Path
) -> None:
    """From nothing but an address: header, hashes by streaming once, fingerprint, a slice."""
    source = HttpSource(session, [address(hub)])
    found = await open_remote(source, ["m.gguf"])
    assert found.tensors == model.tensors
    sha256 = hashlib.sha256(hub.files[REPO]).hexdigest()
    seen: list[FetchProgress] = []
    hashes = await hash_source(found, source, file_sha256={0: sha256}, report=seen.append)
    assert hashes == dict(model.tensor_hashes)
    assert combine(found, hashes) == model.fingerprint
    assert seen[-1].done == model.n_bytes
    with pytest.raises(HashMismatch, match="another hash than is stated"):
        await hash_source(found, source, file_sha256={0: "0" * 64})


async def test_a_large_header_is_read_as_far_as_it_goes(
    session: aiohttp.ClientSession, smollm2: ModelFile
) -> None:
    with run_hub({REPO: smollm2.path.read_bytes()}) as hub:
        found = await open_remote(HttpSource(session, [address(hub)]), ["m.gguf"])
        asked = sum(int(r.partition("-")[2]) - int(r[6:].partition("-")[0]) + 1 for r in hub.ranges)
    assert found.tensors == smollm2.tensors
    assert dict(found.metadata) == dict(smollm2.metadata)
    assert asked < 6 << 20


async def test_split_files_over_http(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", "qwen2", split_tensors=40)
    model = ModelFile.open(path)
    files = {f"org/repo/{file.name}": (tmp_path / file.name).read_bytes() for file in model.files}
    parts = [file.name for file in model.files]
    with run_hub(files) as hub:
        found = await open_remote(HttpSource(session, [address(hub, name) for name in parts]), parts)
        assert found.tensors == model.tensors
        with pytest.raises(MissingPart, match="is part 1 of 3"):
            await open_remote(HttpSource(session, [address(hub, parts[0])]), parts[:1])


async def test_no_model_at_the_address(session: aiohttp.ClientSession) -> None:
    with run_hub({REPO: b"<html>not a model</html>" * 10}) as hub:
        with pytest.raises(NotGGUF):
            await open_remote(HttpSource(session, [address(hub)]), ["m.gguf"])
        with pytest.raises(FetchFailed, match="404"):
            await open_remote(HttpSource(session, [address(hub, "x.gguf")]), ["x.gguf"])
