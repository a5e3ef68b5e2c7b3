"""Runs every benchmark, or those named, and joins all tables kept so far into benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from figures import RESULTS, ROOT

SKIPPED = {"__init__", "fake_node", "figures", "run", "screenshots", "stand", "streams"}
HEAD = """# Results

Each section is one command's, with the machine and the versions. Figures are medians with the least and the
most, of repeats that took turns; ratios are taken pair by pair. Mind what other processes took of the machine
meanwhile: with much of that, ratios say more than rates, and what needs both cores at once suffers most.

"""


def join() -> None:
    """Writes RESULTS.md from the tables that benchmarks kept."""
    parts = [path.read_text() for path in sorted(RESULTS.glob("*.md"))]
    (ROOT / "benchmarks" / "RESULTS.md").write_text(HEAD + "\n".join(parts))


def main() -> int:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in SKIPPED)
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", help="benchmarks to run; none: all")
    options.add_argument("--join", action="store_true", help="run nothing, only join what was kept")
    chosen = options.parse_args()
    failed = []
    for name in () if chosen.join else chosen.names or names:
        sys.stderr.write(f"== {name}\n")
        start = time.monotonic()
        done = subprocess.run([sys.executable, f"benchmarks/{name}.py", "--keep"], cwd=ROOT)
        sys.stderr.write(f"== {name}: {time.monotonic() - start:.0f} s, exit code {done.returncode}\n")
        if done.returncode:
            failed.append(name)
    join()
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
