"""How fast a node that holds nothing yet reads weights: a stand-in until its first shard has measured itself.

Decoding one token reads every weight once, so what counts is the memory that the compute threads get through.
Each thread sums a buffer of its own, larger than most caches, for a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from meshnet.engine.shards import pin_thread

BUFFER_BYTES = 64 << 20
MEASURE_S = 0.05


def read_bytes_per_s(
    threads: int,
    cores: Sequence[int] = (),
    *,
    buffer_bytes: int = BUFFER_BYTES,
    measure_s: float = MEASURE_S,
) -> float:
    """Bytes per second that so many threads of this process, on these cores, read and add up together."""
    counts = [0] * threads
    ready = threading.Barrier(threads + 1)
    size = max(buffer_bytes // threads, 1 << 20)

    def read(index: int) -> None:
        pin_thread(cores)
        values = np.ones(size // 4, dtype=np.float32)
        ready.wait()
        until = time.perf_counter() + measure_s
        while time.perf_counter() < until:
            values.sum()
            counts[index] += values.nbytes

    workers = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - started)
