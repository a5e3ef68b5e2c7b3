"""Runs every benchmark in turn and joins their tables into benchmarks/RESULTS.md."""

from __future__ import annotations

import subprocess
import sys
import time

from figures import RESULTS, ROOT

SKIPPED = {"__init__", "fake_node", "figures", "run", "screenshots", "stand", "streams"}


def main() -> int:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in SKIPPED)
    wanted = sys.argv[1:] or names
    failed = []
    for name in wanted:
        sys.stderr.write(f"== {name}\n")
        start = time.monotonic()
        done = subprocess.run([sys.executable, f"benchmarks/{name}.py", "--keep"], cwd=ROOT)
        sys.stderr.write(f"== {name}: {time.monotonic() - start:.0f} s, exit code {done.returncode}\n")
        if done.returncode:
            failed.append(name)
    parts = [path.read_text() for path in sorted(RESULTS.glob("*.md"))]
    (ROOT / "benchmarks" / "RESULTS.md").write_text("# Results\n\n" + "\n".join(parts))
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
