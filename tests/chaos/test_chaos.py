"""Sixty seconds of chaos with a seed that is printed; `make chaos SEED=N` runs it again."""

from __future__ import annotations

import os
import secrets

import pytest

from chaos.run import run


@pytest.mark.timeout(600)
def test_sixty_seconds_of_chaos() -> None:
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(1 << 32))
    run(60.0, seed)
