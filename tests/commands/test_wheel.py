"""The wheel: everything that runs is in it, and it runs where nothing was ever built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = (
    "src/meshnet/protocol/membership_pb2.py",
    "src/meshnet/protocol/dataplane_pb2_grpc.py",
    "src/meshnet/web/dist/index.html",
)
"""What is built and not committed, one of each kind."""


def test_what_is_built_is_meant_for_the_wheel() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["packages"] == ["src/meshnet"]
    globs = [glob + "/*" if glob.endswith("**") else glob for glob in build["artifacts"]]
    packed = {path for glob in globs for path in ROOT.glob(glob) if path.is_file()}
    for name in MADE:
        assert ROOT / name in packed, f"{name}: built by make setup, and not in the wheel"
    page = (ROOT / MADE[-1]).read_text()
    assets = [part.split('"')[0] for part in page.split('"/dashboard/')[1:]]
    assert assets
    for asset in assets:
        assert ROOT / "src/meshnet/web/dist" / asset in packed


@pytest.mark.full
def test_a_wheel_runs_in_a_fresh_environment(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("meshnet-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.removeprefix("src/") for name in MADE} <= names
    assert not any(name.startswith(("tests/", "web/")) for name in names)
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    # The dependencies are those of this environment; what is installed here comes first.
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MESHNET_CACHE")}
    env |= {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}

    def meshnet(*arguments: str) -> str:
        done = subprocess.run(
            [home / "bin" / "meshnet", *arguments], capture_output=True, text=True, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [str(python), "-c", "import meshnet; print(meshnet.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert found.stdout.startswith(str(site)), found.stderr
    assert meshnet("--version").startswith("meshnet ")
    findings = [json.loads(line) for line in meshnet("doctor", "--json").splitlines()]
    assert {"engine", "cpu", "memory", "disk"} <= {finding["check"] for finding in findings}
    assert "ExecStart=" in meshnet("service", "install", "node", "--dry-run", "--", "meshnet://x")
    assert "grpc-port" in meshnet("config", "show", "tracker")
    tracker = subprocess.Popen(
        [home / "bin" / "meshnet", "tracker", "--port", "0", "--grpc-port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**env, "MESHNET_PARENT_PID": str(os.getpid())},
        cwd=tmp_path,
    )
    try:
        assert tracker.stdout is not None
        root = json.loads(tracker.stdout.readline())["base_url"].removesuffix("/v1")
        page = urllib.request.urlopen(f"{root}/dashboard", timeout=20).read().decode()
        asset = page.split('src="')[1].split('"')[0]
        assert urllib.request.urlopen(root + asset, timeout=20).status == 200
    finally:
        tracker.terminate()
        tracker.communicate(timeout=20)
