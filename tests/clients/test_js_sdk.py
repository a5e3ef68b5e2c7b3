"""OpenAI's JavaScript SDK, in Node, against the real demo."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.kit import check_stopped, newest_call
from support.mesh import Demo, Mesh

SOURCE = Path(__file__).parent / "js"
CACHE = Path(__file__).parents[2] / "build" / "js-clients"
"""Ignored by git; one folder per lock file, so that a new lock is installed anew."""

pytestmark = pytest.mark.skipif(
    shutil.which("npm") is None or shutil.which("node") is None, reason="Node and npm are not installed"
)
Scenario = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def scenario_file() -> Path:
    """The scenario beside the packages that its lock file names, installed with `npm ci` once."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    folder = CACHE / hashlib.sha256(lock).hexdigest()[:16]
    done = folder / "installed"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "scenario.mjs"):
        shutil.copy(SOURCE / name, folder / name)
    if not done.exists():
        install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        made = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=300)
        if made.returncode:
            pytest.skip(f"npm cannot install the SDK: {made.stderr.strip()[-300:]}")
        done.touch()
    return folder / "scenario.mjs"


def run(file: Path, name: str, base_url: str, key: str) -> dict[str, Any]:
    environment = {**os.environ, "MESHNET_BASE_URL": base_url, "MESHNET_API_KEY": key}
    done = subprocess.run(
        ["node", file.name, name],
        cwd=file.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


@pytest.fixture
def scenario(scenario_file: Path, demo: Demo) -> Scenario:
    return lambda name: run(scenario_file, name, demo.base_url, demo.api_key)


def test_models(scenario: Scenario) -> None:
    outcome = scenario("models")
    assert outcome["listed"] == [outcome["retrieved"]]


def test_streams_and_answers_say_the_same(scenario: Scenario) -> None:
    answer, stream, helper = scenario("answer"), scenario("stream"), scenario("helper")
    assert answer["text"]
    assert stream["text"] == helper["text"] == helper["deltas"] == answer["text"]
    assert stream["role"] == "assistant"
    assert stream["reasons"] == [answer["reason"]]
    assert stream["last"] == []
    assert stream["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert answer["requestId"]
    assert answer["call"].startswith("call-")


def test_completions(scenario: Scenario) -> None:
    outcome = scenario("completion")
    assert outcome["streamed"]
    assert outcome["streamed"] == outcome["whole"]


def test_an_aborted_stream_stops_the_nodes(scenario: Scenario, demo: Demo) -> None:
    outcome = scenario("abort")
    assert outcome["seen"] >= 4
    check_stopped(demo, outcome["call"])


def test_an_aborted_wait_stops_the_nodes(scenario: Scenario, demo: Demo) -> None:
    assert scenario("abortWaiting") == {"error": "APIUserAbortError"}
    call = newest_call(demo)
    assert not call["stream"]
    check_stopped(demo, call["id"])


def test_errors_have_their_classes(scenario: Scenario) -> None:
    assert scenario("errors") == {
        "bad": ["BadRequestError", 400, "invalid_value", "temperature"],
        "unknown": ["BadRequestError", 400, "unknown_parameter", "foo"],
        "missing": ["NotFoundError", 404, "model_not_found", "model"],
        "key": ["AuthenticationError", 401, "invalid_api_key", None],
    }


@pytest.mark.full
def test_retries_carry_a_client_over_a_gap(scenario_file: Path, mesh: Mesh) -> None:
    mesh.start_tracker()
    mesh.start_node("front", "0-14")
    mesh.wait_ready("front")
    outcome: dict[str, Any] = {}

    def ask() -> None:
        outcome.update(run(scenario_file, "retries", f"{mesh.root}/v1", mesh.info["api_key"]))

    asking = threading.Thread(target=ask)
    asking.start()
    mesh.start_node("back", "15-29")
    asking.join(120)
    assert outcome["text"]
    assert outcome["tries"] > 1
