"""Sixty seconds of chaos with a seed that pytest's header shows; `make chaos SEED=N` runs it again.

CI runs `make chaos` beside the quick suite.
"""

from __future__ import annotations

import os

import pytest

from chaos.run import run


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sixty_seconds_of_chaos() -> None:
    run(60.0, int(os.environ["CHAOS_SEED"]))
