"""The numerics class: equal strings mean that equal inputs give equal bits.

What goes in is what was seen to move bits: the llama.cpp build, the backend and its devices, the CPU features
that choose kernels, flash attention and weight repacking, and the number of threads where the build does not
let go of splitting attention between them. What was seen not to (threads otherwise, the grouping of sessions
in a call below 64 rows, the number of cells, where the model is cut) is left out.
"""

from __future__ import annotations

import hashlib
import platform
import re

from meshnet.engine.library import Library

EXACT_ROWS = 63
"""Rows of one attention call up to which the CPU's flash attention runs the same kernel as for one row."""

_FEATURE = re.compile(r"([A-Z0-9_]+) = 1")


def cpu_features(system_info: str) -> tuple[str, ...]:
    """The features that llama.cpp says its kernels use, from `llama_print_system_info`."""
    return tuple(sorted(set(_FEATURE.findall(system_info)) - {"OPENMP"}))


def numerics_class(
    library: Library, *, devices: tuple[str, ...] = (), repack: bool = False, threads: int | None = None
) -> str:
    """The class of an engine on this machine.

    `devices` are names of accelerators that compute layers; `threads` is given where their number matters.
    """
    info: bytes = library.api.llama_print_system_info() or b""
    features = cpu_features(info.decode())
    digest = hashlib.sha256(" ".join(features).encode()).hexdigest()[:8]
    where = "+".join(devices) if devices else "cpu"
    parts = [
        f"llama.cpp/{library.provider}-{library.version}",
        where,
        platform.machine().lower(),
        f"features-{digest}",
        "fa",
    ]
    if repack:
        parts.append("repacked")
    if threads is not None:
        parts.append(f"threads-{threads}")
    return ";".join(parts)
