"""A further machine joins with one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.mesh import Mesh, Process, answer_text, chat


def _meshnet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshnet", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_a_link_brings_a_node_in_and_only_as_often_as_it_says(mesh: Mesh, tmp_path: Path) -> None:
    mesh.start_tracker()
    made = _meshnet(
        "invite", "--tracker", mesh.root, "--uses", "1", "--json", MESHNET_API_KEY=mesh.info["admin_key"]
    )
    assert made.returncode == 0, made.stderr
    link = json.loads(made.stdout)["join_link"]
    shared = [
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--model",
        "smollm2",
        "--layers",
        "0-29",
        "--json",
        "--no-retry",
    ]
    first = Process(["node", link, "--data", str(tmp_path / "a"), *shared], tmp_path / "a.log")
    try:
        first.line()
        mesh.nodes["a"] = first
        with mesh.client() as client:
            assert answer_text(chat(client, "Say hello.", max_tokens=8))
        second = _meshnet("node", link, "--data", str(tmp_path / "b"), *shared)
        assert second.returncode == 1
        assert "token" in second.stderr
        assert link.split("token=")[1] not in second.stderr
    finally:
        first.stop()


def test_a_use_key_cannot_invite(mesh: Mesh) -> None:
    mesh.start_tracker()
    made = _meshnet("invite", "--tracker", mesh.root, MESHNET_API_KEY=mesh.info["api_key"])
    assert made.returncode == 1
    assert "admin" in made.stderr


def test_a_broken_link_or_none_is_one_sentence() -> None:
    for arguments, words in (
        (["node", "meshnet://a:1/m"], "no token"),
        (["node", "--model", "smollm2", "--layers", "0-3"], "meshnet invite"),
    ):
        done = _meshnet(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
