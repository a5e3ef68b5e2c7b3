"""`meshnet model` as its own process: what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.hub import run_hub
from support.random_gguf import UNCUTTABLE

from meshnet.commands.model import parse_cuts, parse_layers
from meshnet.models.gguf import ModelFile

RandomModel = Callable[..., Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `meshnet model ...` with a store of its own."""

    def call(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "meshnet", "model", *map(str, arguments)],
            env={**os.environ, "MESHNET_CACHE": str(tmp_path / "cache"), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


def test_pull_ls_slice(run: Run, tmp_path: Path) -> None:
    assert "no models yet" in run("ls").stdout
    pulled = run("pull", "smollm2", "--json")
    assert pulled.returncode == 0, pulled.stderr
    entry = json.loads(pulled.stdout)
    assert (entry["id"], entry["layers"], len(entry["fingerprint"])) == ("smollm2-135m-instruct", 30, 64)
    listed = run("ls").stdout.splitlines()
    assert len(listed) == 2
    assert listed[1].split()[:4] == ["smollm2-135m-instruct", "(smollm2)", "llama", "30"]
    out = tmp_path / "tail.gguf"
    cut = run("slice", "smollm2", "--layers", "15-29", "--out", out)
    assert cut.returncode == 0, cut.stderr
    shard = ModelFile.open(out)
    assert (shard.shard_range, shard.fingerprint) == ((15, 29), entry["fingerprint"])
    assert "layers 15-29 of" in cut.stdout


def test_ls_says_what_has_gone(run: Run, tmp_path: Path, random_models: RandomModel) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(random_models("qwen2").read_bytes())
    assert run("pull", path).returncode == 0
    path.unlink()
    (row,) = json.loads(run("ls", "--json").stdout)
    assert row["id"] == "mine"
    assert "no such file" in row["problem"]


def test_pull_from_a_hub_shows_progress_and_resumes(run: Run, random_models: RandomModel) -> None:
    with run_hub({"org/repo/m.gguf": random_models("llama").read_bytes()}) as hub:
        hub.cut_after = [15_000_000]
        pulled = run("pull", "hf:org/repo/m.gguf", HF_ENDPOINT=hub.url)
        assert pulled.returncode == 0, pulled.stderr
        assert "MB" in pulled.stderr
        assert "bytes=10485760-" in hub.ranges, "whole chunks of 10 MiB are kept"
    assert run("ls").stdout.splitlines()[1].startswith("m ")


def test_bad_input(run: Run, tmp_path: Path, random_models: RandomModel) -> None:
    """One clear sentence on stderr, no traceback, and a non-zero exit."""
    note = tmp_path / "note.gguf"
    note.write_text("I am no model")
    short = tmp_path / "short.gguf"
    short.write_bytes(random_models("qwen2").read_bytes()[:-100])
    cases = [
        (("pull", "llama9"), "no such file, and no known model"),
        (("pull", note), "not a GGUF file"),
        (("pull", short), "the download was cut short"),
        (("pull", "hf:org"), "not of the form hf:ORG/REPO/FILE.gguf"),
        (("slice", "llama9", "--layers", "0-1"), "no model 'llama9' here"),
        (("slice", random_models("qwen2"), "--layers", "0-8"), "has layers 0-7; 0-8 is not a range of them"),
        (("slice", random_models("qwen2"), "--layers", "x-8"), "no layer range"),
        (("slice", random_models(UNCUTTABLE), "--layers", "0-3"), f"'{UNCUTTABLE}' cannot be cut"),
    ]
    for arguments, said in cases:
        failed = run(*arguments)
        words = " ".join(failed.stderr.replace("│", " ").split())
        assert failed.returncode != 0, arguments
        assert said in words, words
        assert "Traceback" not in failed.stderr


def test_plan_counts_the_output_matrix(run: Run, random_models: RandomModel) -> None:
    """Equal machines do not share SmolLM2 in the middle: the tail has 30 of 97 MB in its output matrix."""
    assert run("pull", "smollm2").returncode == 0
    planned = run("plan", "smollm2", "--nodes", "a:100,b:100", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    head, tail = plan["stages"]
    assert (head["start_layer"], tail["end_layer"]) == (0, 29)
    assert plan["cuts"] == [tail["start_layer"]]
    assert 16 <= tail["start_layer"] <= 21
    assert plan["slowest_ms"] < 6
    shown = run("plan", "smollm2", "--nodes", "fast:100,slow:10", "--memory", "fast:80MB")
    assert shown.returncode == 0, shown.stderr
    assert "cuts: " in shown.stdout
    assert "the output matrix" in shown.stdout


def test_plan_that_cannot_be_made(run: Run, random_models: RandomModel) -> None:
    small = run("plan", random_models("llama"), "--nodes", "a:1", "--memory", "a:1MB")
    assert small.returncode == 1
    assert "add a node or memory" in small.stderr
    assert "Traceback" not in small.stderr
    misspelt = run("plan", random_models("llama"), "--nodes", "a:fast")
    assert misspelt.returncode == 2
    assert "give a number above 0" in " ".join(misspelt.stderr.replace("│", " ").split())


def test_parsing() -> None:
    assert parse_layers("3-14") == (3, 14)
    assert parse_layers("7") == (7, 7)
    assert parse_cuts("10, 20") == [10, 20]
    assert parse_cuts("") == []
    for text in ("", "-3", "3-", "a-b", "1-2-3"):
        with pytest.raises(typer.BadParameter):
            parse_layers(text)
    with pytest.raises(typer.BadParameter):
        parse_cuts("1,x")
