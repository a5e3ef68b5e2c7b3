"""Where a value comes from: flag, then environment, then file, then default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshnet.config import ConfigError, load_config, option_defaults

COMMANDS = ("node", "tracker", "demo", "model")


def _write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def _run(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshnet", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "MESHNET_CONFIG": str(path), **environment},
    )


def _sources(path: Path, **environment: str) -> dict[str, tuple[object, str]]:
    done = _run(path, "config", "show", "demo", "--json", **environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["option"]: (row["value"], row["source"]) for row in rows}


def test_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    path = _write(tmp_path, '[demo]\ncuts = "10,20"\nport = 9090\n')
    found = _sources(path, MESHNET_DEMO_PORT="9191")
    assert found["port"] == ("9191", "environment MESHNET_DEMO_PORT")
    assert found["cuts"] == ("10,20", "config file")
    assert found["replicas"] == (1, "default")


@pytest.mark.parametrize(
    ("text", "environment", "flags", "wrong"),
    [
        ('[demo]\ncuts = "31"\n', {}, [], "31"),
        ('[demo]\ncuts = "31"\n', {"MESHNET_DEMO_CUTS": "32"}, [], "32"),
        ('[demo]\ncuts = "31"\n', {"MESHNET_DEMO_CUTS": "32"}, ["--cuts", "33"], "33"),
    ],
    ids=["file", "environment over file", "flag over both"],
)
def test_the_command_uses_the_value_that_wins(
    tmp_path: Path, text: str, environment: dict[str, str], flags: list[str], wrong: str
) -> None:
    """Seen in the refusal of a cut that the model does not have."""
    done = _run(_write(tmp_path, text), "demo", "--json", "--port", "0", *flags, **environment)
    assert done.returncode == 1
    assert f"--cuts: {wrong} is outside 1..29" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nod]\n", ["[nod]", "node", "tracker"]),
        ("[node\n", ["not valid TOML"]),
        ("node = 3\n", ["[node]", "table"]),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, commands=COMMANDS)
    for word in (*words, str(path)):
        assert word in str(caught.value)


def test_an_unknown_key_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[node\] has no option 'thraeds'; it has grpc-port, threads"):
        option_defaults(tmp_path, "node", {"thraeds": 2}, ["threads", "grpc_port"])


def test_only_options_come_from_the_environment(tmp_path: Path) -> None:
    said = _run(_write(tmp_path, ""), "config", "--help", MESHNET_VERSION="1").stdout
    assert said.startswith("Usage: meshnet config")


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    done = _run(tmp_path / "none.toml", "demo", "--json")
    assert done.returncode == 2
    assert "there is no such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_file_there_are_only_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHNET_CONFIG", raising=False)
    assert load_config(tmp_path / "none.toml", commands=COMMANDS) == {}
