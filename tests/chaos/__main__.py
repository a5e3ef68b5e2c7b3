"""`python -m chaos`: a mesh of four nodes under streams while nodes are killed, stopped, cut off and slowed.

Run it in `tests/` (or by `make chaos`, and `make soak` for the calm variant).
"""

from __future__ import annotations

import argparse
import secrets
import sys

from chaos.run import Broken, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the storm lasts")
    parser.add_argument("--seed", type=int, default=None, help="of the storm and the calls (default: drawn)")
    parser.add_argument("--calm", action="store_true", help="streams only: nothing is broken (soak)")
    parser.add_argument("--report", type=float, default=60.0, help="seconds between two lines of figures")
    given = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    try:
        run(given.seconds, seed, calm=given.calm, report_s=given.report, say=_say)
    except Broken as broken:
        sys.stderr.write(f"{broken}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
