"""The dashboard's own unit tests and type check, run by the tools of web/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"


@pytest.mark.parametrize("script", ["test", "check"])
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed here")
def test_npm_run(script: str) -> None:
    done = subprocess.run(
        ["npm", "run", script],
        cwd=WEB,
        env={**os.environ, "CI": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6_000:]


def test_the_lock_file_names_no_download_address() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []
    assert all("integrity" in package for name, package in lock["packages"].items() if name)
