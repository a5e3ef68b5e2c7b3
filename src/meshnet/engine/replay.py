"""Where replaying generated tokens in chunks is proven to give the same bits as generating them.

Proven by `meshnet model check FILE --replay`, per (architecture, quantisation, numerics class), and kept in
the cache folder. Where that never ran, a shard tries a few rows on its own weights in its self-test. Where
nothing is proven, generated tokens are replayed one at a time.
"""

from __future__ import annotations

import json
from pathlib import Path

from meshnet.engine.numerics import EXACT_ROWS
from meshnet.models.files import write_atomically
from meshnet.models.store import default_root


def proofs_file() -> Path:
    """In the folder that the store of models uses."""
    return default_root() / "replay.json"


def _key(arch: str, quantisation: str, numerics: str) -> str:
    return f"{arch}|{quantisation}|{numerics}"


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, int) and not isinstance(v, bool)}


def proven_rows(arch: str, quantisation: str, numerics: str) -> int | None:
    """Rows per replay chunk as `meshnet model check --replay` found them, 0 to 63; None: it did not run."""
    rows = _read(proofs_file()).get(_key(arch, quantisation, numerics))
    return rows if rows is not None and 0 <= rows <= EXACT_ROWS else None


def record_proof(arch: str, quantisation: str, numerics: str, rows: int) -> Path:
    """Keep a result of the replay check; returns the file."""
    path = proofs_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    proofs = _read(path)
    proofs[_key(arch, quantisation, numerics)] = rows
    write_atomically(path, json.dumps(proofs, indent=1, sort_keys=True).encode())
    return path
