"""Fetching a slice by byte ranges: from a tracker's store, from a neighbour, from a hub.

The plan says which bytes of the source go where; each tensor is hashed while it streams in and counts once
its hash is right. A journal beside the unfinished file keeps which tensors are done, so that a fetch that was
cut goes on from there; within one run it goes on from the very byte. Tensors that adjoin in the source come
in one request.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from meshnet.models.errors import FetchFailed, HashMismatch
from meshnet.models.files import sync_folder, write_atomically
from meshnet.models.fingerprint import verify
from meshnet.models.gguf import ModelFile
from meshnet.models.slice import Piece, SlicePlan

RUN_BYTES = 256 << 20
SAVE_EVERY_BYTES = 128 << 20
ATTEMPTS = 6
RATE_WINDOW_S = 5.0
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0


class ByteSource(Protocol):
    """Something that a model's files can be read from by range."""

    def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """The bytes `offset..offset+length` of file `file_index`, in pieces of any size.

        Raises SourceCut where it broke off and may work later, another ModelError where it will not.
        """


class SourceCut(FetchFailed):
    """The source broke off; trying again may help."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is: bytes that are there, bytes in all, and bytes per second over the last seconds."""

    done: int
    total: int
    bytes_per_s: float


Report = Callable[[FetchProgress], None]
Sleep = Callable[[float], Awaitable[None]]


class _Journal(msgspec.Struct):
    plan: str
    done: list[str]


class RateMeter:
    """Bytes per second over the last few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=4096)
        self._total = 0

    def add(self, count: int) -> float:
        """Count bytes; returns the rate."""
        now = self._clock()
        self._total += count
        self._seen.append((now, self._total))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (self._total - before) / (now - since) if now > since else 0.0


class RateLimit:
    """Lets at most `bytes_per_s` through, one second's worth at a time."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"rate limit is {bytes_per_s}; give a positive number of bytes per second")
        self._rate = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    async def spend(self, count: int) -> None:
        """Wait until `count` more bytes are allowed."""
        now = self._clock()
        self._free_at = max(self._free_at, now - 1.0) + count / self._rate
        if self._free_at > now:
            await self._sleep(self._free_at - now)


async def fetch_slice(
    plan: SlicePlan,
    source: ByteSource,
    out: Path,
    *,
    report: Report | None = None,
    limit: RateLimit | None = None,
    attempts: int = ATTEMPTS,
    sleep: Sleep = asyncio.sleep,
    blame: Callable[[Piece], None] | None = None,
) -> Path:
    """Put the slice of `plan` at `out`, its bytes from `source`, each tensor checked against its sha256.

    The plan's model must know its fingerprint and tensor hashes, which are checked against each other; that
    the fingerprint is the wanted one is the caller's to check. After a SourceCut it tries again from where it
    was, until `attempts` in a row brought nothing; a tensor with a wrong hash is fetched once more. What is
    verified stays for the next call. `blame` is told of a tensor whose hash was wrong before it is fetched
    again. Raises FetchFailed, HashMismatch, or what the source raises.
    """
    await asyncio.to_thread(verify, plan.model)
    hashes = dict(plan.model.tensor_hashes)
    part = out.with_name(f".{out.name}.part")
    try:
        fetch = await asyncio.to_thread(_Fetch, plan, source, part, hashes, report, limit, attempts, sleep)
        try:
            for run in _runs([piece for piece in plan.pieces if piece.source_name not in fetch.done]):
                for piece in await fetch.run(run):
                    if blame is not None:
                        blame(piece)
                    await fetch.again(piece)
        finally:
            await asyncio.to_thread(fetch.close)
        await asyncio.to_thread(fetch.finish, out)
    except OSError as error:
        raise FetchFailed(f"{out}: cannot be written: {error.strerror or error}; free some space") from error
    return out


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in the order of the source; those that adjoin there together, up to RUN_BYTES."""
    runs: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda each: (each.file_index, each.offset)):
        last = runs[-1][-1] if runs else None
        adjoins = last is not None and (last.file_index, last.offset + last.length) == (
            piece.file_index,
            piece.offset,
        )
        if adjoins and piece.offset + piece.length - runs[-1][0].offset <= RUN_BYTES:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


class _Fetch:
    """One call of `fetch_slice`: the unfinished file, what of it is verified, and how far it is."""

    def __init__(
        self,
        plan: SlicePlan,
        source: ByteSource,
        part: Path,
        hashes: Mapping[str, str],
        report: Report | None,
        limit: RateLimit | None,
        attempts: int,
        sleep: Sleep,
    ) -> None:
        self._plan = plan
        self._source = source
        self._part = part
        self._journal = part.with_name(f"{part.name}.json")
        self._hashes = hashes
        self._report = report
        self._limit = limit
        self._attempts = attempts
        self._sleep = sleep
        self._meter = RateMeter()
        self._unsaved = 0
        self.done = self._resume()
        self._arrived = sum(piece.length for piece in plan.pieces if piece.source_name in self.done)
        part.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(part, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        os.ftruncate(self._handle, plan.n_bytes)
        _write(self._handle, 0, memoryview(plan.header))

    async def again(self, piece: Piece) -> None:
        """Fetch a tensor whose hash was wrong a second and last time."""
        if await self.run([piece]):
            raise HashMismatch(
                f"{self._plan.model.name}: {piece.source_name} arrived twice with a wrong hash; "
                "the source has another or a damaged file, fetch from elsewhere"
            )

    async def run(self, pieces: list[Piece]) -> list[Piece]:
        """Fetch adjoining tensors; returns those whose hash is wrong."""
        wrong: list[Piece] = []
        waiting = deque(pieces)
        digest, at, failures = hashlib.sha256(), 0, 0
        while waiting:
            start = waiting[0].offset + at
            end = waiting[-1].offset + waiting[-1].length
            try:
                async for chunk in self._chunks(waiting[0].file_index, start, end - start):
                    failures = 0
                    view = memoryview(chunk)
                    while view:
                        piece = waiting[0]
                        own = view[: piece.length - at]
                        await asyncio.to_thread(_keep, self._handle, piece.target_offset + at, own, digest)
                        self._count(len(own))
                        at, view = at + len(own), view[len(own) :]
                        if at == piece.length:
                            if digest.hexdigest() == self._hashes[piece.source_name]:
                                self.done.add(piece.source_name)
                            else:
                                wrong.append(piece)
                                self._arrived -= piece.length
                            waiting.popleft()
                            digest, at = hashlib.sha256(), 0
                    if self._unsaved >= SAVE_EVERY_BYTES:
                        await asyncio.to_thread(self.save)
            except SourceCut as error:
                failures += 1
                if failures >= self._attempts:
                    raise FetchFailed(
                        f"{self._plan.model.name}: {error}; gave up after {failures} attempts, "
                        "what is verified is kept for the next one"
                    ) from error
                await self._sleep(min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S))
        return wrong

    async def _chunks(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """What the source sends, held to the length that was asked for and to the rate limit."""
        left = length
        async for chunk in self._source.read(file_index, offset, length):
            if len(chunk) > left:
                raise FetchFailed(f"{self._plan.model.name}: the source sends more than it was asked for")
            if self._limit is not None:
                await self._limit.spend(len(chunk))
            left -= len(chunk)
            yield chunk
        if left:
            raise SourceCut(f"the source ended after {length - left} of {length} bytes")

    def _count(self, count: int) -> None:
        self._arrived += count
        self._unsaved += count
        rate = self._meter.add(count)
        if self._report is not None:
            self._report(FetchProgress(self._arrived, self._plan.copy_bytes, rate))

    def save(self) -> None:
        """Note what is verified. The bytes reach the disk before the note that says so."""
        os.fsync(self._handle)
        note = _Journal(_plan_hash(self._plan), sorted(self.done))
        write_atomically(self._journal, msgspec.json.encode(note))
        self._unsaved = 0

    def close(self) -> None:
        """Keep what is verified, whether the fetch is complete or not."""
        if self._handle >= 0:
            try:
                self.save()
            finally:
                os.close(self._handle)
                self._handle = -1

    def finish(self, out: Path) -> None:
        self._part.replace(out)
        self._journal.unlink(missing_ok=True)
        sync_folder(out.parent)

    def _resume(self) -> set[str]:
        """The tensors that an earlier run of the same plan has verified."""
        try:
            kept = msgspec.json.decode(self._journal.read_bytes(), type=_Journal)
            same = kept.plan == _plan_hash(self._plan) and self._part.stat().st_size == self._plan.n_bytes
        except (OSError, msgspec.MsgspecError):
            same = False
        if not same:
            self._part.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
            return set()
        return set(kept.done) & {piece.source_name for piece in self._plan.pieces}


def _keep(handle: int, offset: int, view: memoryview, digest: hashlib._Hash) -> None:
    digest.update(view)
    _write(handle, offset, view)


def _write(handle: int, offset: int, view: memoryview) -> None:
    os.lseek(handle, offset, os.SEEK_SET)
    while view:
        view = view[os.write(handle, view) :]


def _plan_hash(plan: SlicePlan) -> str:
    return hashlib.sha256(plan.header + plan.model.fingerprint.encode()).hexdigest()


async def hash_source(
    model: ModelFile,
    source: ByteSource,
    *,
    file_sha256: Mapping[int, str] | None = None,
    report: Report | None = None,
) -> dict[str, str]:
    """The sha256 of every tensor of a model that is on no disk here, by streaming its files through once.

    `file_sha256` (file index -> hex), as a hub states them, are checked on the way. Raises HashMismatch.
    """
    meter, done = RateMeter(), 0
    hashes: dict[str, str] = {}
    for index, file in enumerate(model.files):
        whole = hashlib.sha256()
        tensors = sorted(
            (t for t in model.tensors if t.file_index == index), key=lambda tensor: tensor.offset
        )
        at, digest = 0, hashlib.sha256()
        waiting = deque(tensors)
        async for chunk in source.read(index, 0, file.n_bytes):
            whole.update(chunk)
            view, start = memoryview(chunk), at
            at += len(chunk)
            while waiting and at > waiting[0].offset:
                tensor = waiting[0]
                end = tensor.offset + tensor.n_bytes
                digest.update(view[max(tensor.offset - start, 0) : end - start])
                if at < end:
                    break
                hashes[waiting.popleft().name] = digest.hexdigest()
                digest = hashlib.sha256()
            done += len(chunk)
            if report is not None:
                report(FetchProgress(done, model.n_bytes, meter.add(len(chunk))))
        if waiting:
            raise SourceCut(f"{file.name}: the source ended after {at} of {file.n_bytes} bytes; try again")
        stated = (file_sha256 or {}).get(index)
        if stated is not None and whole.hexdigest() != stated:
            raise HashMismatch(f"{file.name}: its bytes have another hash than is stated; fetch it elsewhere")
    return hashes
