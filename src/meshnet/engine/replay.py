"""Where replaying generated tokens in chunks is proven to give the same bits as generating them.

Proven by `meshnet model check FILE --replay`, per (architecture, quantisation, numerics class), and kept in
the cache folder. Where nothing is proven, generated tokens are replayed one at a time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from meshnet.engine.numerics import EXACT_ROWS


def proofs_file() -> Path:
    """`$MESHNET_CACHE`, or the user's cache folder, / replay.json."""
    base = os.environ.get("MESHNET_CACHE")
    if base:
        return Path(base) / "replay.json"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "meshnet" / "replay.json"


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


def proven_rows(arch: str, quantisation: str, numerics: str) -> int:
    """Rows per replay chunk that are proven exact: 63, or 1 where nothing is known."""
    rows = _read(proofs_file()).get(_key(arch, quantisation, numerics), 1)
    return rows if 1 <= rows <= EXACT_ROWS else 1


def record_proof(arch: str, quantisation: str, numerics: str, rows: int) -> Path:
    """Keep a result of the replay check; returns the file."""
    path = proofs_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    proofs = _read(path)
    proofs[_key(arch, quantisation, numerics)] = rows
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(proofs, indent=1, sort_keys=True))
    fresh.replace(path)
    return path
