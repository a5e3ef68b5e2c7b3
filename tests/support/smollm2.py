"""The real model, brought once into the tests' own cache as a user's first run brings it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from meshnet.models.store import Store


@cache
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf, 98 MB."""
    return Store().pull("smollm2").path
