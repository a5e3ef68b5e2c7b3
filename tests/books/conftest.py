"""Books on both databases, with a clock that the test moves."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from books.kit import Kit
from books.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server."""
    # Not in pytest's own folder: as root the server runs as another user, who must reach its data,
    # and every start of pytest closes that folder to others again.
    with tempfile.TemporaryDirectory(prefix="meshnet-postgres-") as folder:
        server = Postgres(Path(folder) / "data")
        yield server
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """A place for new books: a data directory, then a PostgreSQL database."""
    if request.param == "sqlite":
        yield str(tmp_path / "data")
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = await server.new_database()
    yield url
    await server.take_back(url)


@pytest.fixture
async def kit(where: str) -> AsyncIterator[Kit]:
    """New books with a tracker on them, two accounts and a priced model."""
    made = await Kit.make(where)
    yield made
    await made.close()
