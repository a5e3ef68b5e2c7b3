"""The parts lean only the way ARCHITECTURE.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "meshnet"
ALLOWED = {
    "routing": set[str](),
    "models": set[str](),
    "protocol": set[str](),
    "engine": {"models"},
    "node": {"protocol", "models", "engine", "process", "listening"},
    "tracker": {"protocol", "models", "routing", "process", "listening"},
}


def _imports(path: Path) -> set[str]:
    """The parts of ours that a module imports, at any depth of the file."""
    found = set()
    for item in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(item, ast.Import):
            names = [alias.name for alias in item.names]
        elif isinstance(item, ast.ImportFrom) and item.module:
            assert item.level == 0, f"{path}: relative import"
            names = [f"{item.module}.{alias.name}" for alias in item.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "meshnet" and len(pieces) > 1 and pieces[1] != "__version__":
                found.add(pieces[1])
    return found


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_lean_the_right_way(part: str) -> None:
    modules = [p for p in (SOURCE / part).rglob("*.py") if "_pb2" not in p.name]
    assert modules
    for path in modules:
        extra = _imports(path) - ALLOWED[part] - {part}
        assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}"


def test_routing_is_pure() -> None:
    forbidden = {"asyncio", "time", "socket", "threading", "os", "random", "datetime", "pathlib", "aiohttp"}
    for path in (SOURCE / "routing").rglob("*.py"):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.Import):
                names = {alias.name.split(".")[0] for alias in item.names}
            elif isinstance(item, ast.ImportFrom):
                names = {(item.module or "").split(".")[0]}
            else:
                continue
            assert not names & forbidden, f"{path.name} imports {sorted(names & forbidden)}"


def test_modules_are_short() -> None:
    """A module is read in a sitting; thousands of lines are how the peers got stuck."""
    for path in SOURCE.rglob("*.py"):
        if "_pb2" not in path.name:
            assert len(path.read_text().splitlines()) <= 700, path.relative_to(SOURCE)
