"""Before a shard is loaded: its segments, the files they come from, and the threads that will run them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from meshnet.engine.base import EngineError
from meshnet.models.gguf import ModelFile
from meshnet.models.slice import plan_slice, write_slice

WORK_PER_THREAD = 16 << 20

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0..1."""


class ShardStore(Protocol):
    """Where shards come from; `meshnet.models.store.Store` is one."""

    def shard(self, model: ModelFile, first: int, last: int) -> Path:
        """A file with these layers, held until it is released."""

    def release(self, path: Path) -> None:
        """The file is no longer used."""


def segment_borders(model: ModelFile, first: int, last: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    if not 0 <= first <= last < model.n_layers:
        raise EngineError(
            f"{model.name} has layers 0-{model.n_layers - 1}; {first}-{last} is no range of them"
        )
    for cut in cuts:
        if not first <= cut <= last:
            raise EngineError(f"cut {cut} is not a layer of the shard {first}-{last}")
    starts = sorted({first, *cuts})
    return list(zip(starts, [start - 1 for start in starts[1:]] + [last], strict=True))


def shard_file(
    model: ModelFile, first: int, last: int, whole: bool, store: ShardStore | None, cleanup: ExitStack
) -> Path:
    """Where the segment's file lies; `cleanup` lets go of it."""
    if whole or model.shard_range == (first, last):
        return model.path
    if store is not None:
        path = store.shard(model, first, last)
        cleanup.callback(store.release, path)
        return path
    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="meshnet-shard-"))
    return write_slice(plan_slice(model, first, last), Path(folder) / f"{model.name}-{first}-{last}.gguf")


def layers_on_gpu(gpu_layers: int, own: int, behind: int) -> int:
    """Of `gpu_layers` layers counted from the shard's end, those that a segment has; -1: all."""
    return own + 1 if gpu_layers < 0 else max(0, min(own + 1, gpu_layers - behind))


def part_of(
    progress: Progress | None, index: int, count: int, first: int, last: int
) -> Callable[[float], None] | None:
    if progress is None:
        return None
    return lambda fraction: progress(f"loading layers {first}-{last}", (index + fraction) / count)


def default_threads(cores: Sequence[int] | None, weights: int) -> int:
    """As many threads as CPUs that compute may run on, but no more than have something to do: threads meet
    after every tensor, which costs more than it brings where a thread has less than WORK_PER_THREAD bytes."""
    if cores:
        usable = len(cores)
    elif hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, min(usable, weights // WORK_PER_THREAD))


def pin_thread(cores: Sequence[int] | None) -> None:
    """Bind the calling thread, and with it the compute threads that it starts, to the cores."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise EngineError(f"cores {list(cores)} cannot be used: {error}") from error
