"""The published document is true: schemathesis runs over it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import jsonschema
import pytest
from tracker.conftest import Running, Start

UNENDING = "/api/events"
CONFIG = """
[checks]
# A route that does not exist is a 503: docs/api.md.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]
negative_data_rejection.expected-statuses = ["400", "401", "403", "404", "405", "409", "413", "415", "429"]
"""


async def test_the_document_describes_every_route(tracker: Running) -> None:
    async with tracker.http.get(f"{tracker.base}/openapi.json") as answer:
        document = await answer.json()
    assert document["openapi"].startswith("3.1")
    assert {"get", "delete"} <= set(document["paths"]["/api/calls/{call}"])
    assert "ChatBody" in json.dumps(document["paths"]["/v1/chat/completions"])
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        for reference in _references(schema):
            assert reference in document["components"]["schemas"], (name, reference)


def _references(schema: object) -> list[str]:
    if isinstance(schema, dict):
        found = [schema["$ref"].rsplit("/", 1)[1]] if isinstance(schema.get("$ref"), str) else []
        return found + [name for value in schema.values() for name in _references(value)]
    if isinstance(schema, list):
        return [name for value in schema for name in _references(value)]
    return []


async def schemathesis(tracker: Running, folder: Path, *options: str) -> None:
    command = Path(sys.executable).with_name("schemathesis")
    if not command.exists() and shutil.which("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    (folder / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        str(command),
        "run",
        f"{tracker.base}/openapi.json",
        "--header",
        f"Authorization: Bearer {tracker.admin_key}",
        "--exclude-path",
        UNENDING,
        "--checks",
        "all",
        # What hangs together between fields (tool_choice needs tools) cannot be said in a schema.
        "--exclude-checks",
        "positive_data_acceptance",
        "--no-color",
        *options,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = (await process.stdout.read()).decode()
    assert await process.wait() == 0, output[-12_000:]


async def test_schemathesis_finds_nothing(start: Start, tmp_path: Path) -> None:
    """A few cases of every operation, the same each time; the time is a bound for slow machines."""
    tracker = await start(failed_keys_per_minute=100_000)
    await tracker.node()
    few = ("--max-examples", "2", "--generation-deterministic", "--max-time", "50")
    await schemathesis(tracker, tmp_path, "--phases", "fuzzing", *few)


@pytest.mark.full
@pytest.mark.parametrize("phases", ["examples,coverage", "fuzzing,stateful"])
async def test_schemathesis_finds_nothing_by_searching_long_either(
    start: Start, tmp_path: Path, phases: str
) -> None:
    tracker = await start(failed_keys_per_minute=100_000)
    await tracker.node()
    bounds = ("--max-examples", "30", "--max-time", "900")
    await schemathesis(tracker, tmp_path, "--phases", phases, *bounds)
