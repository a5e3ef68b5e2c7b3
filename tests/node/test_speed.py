"""What an empty node says of itself, and how fast it may fetch."""

from __future__ import annotations

import pytest
import typer

from meshnet.commands.node import _size
from meshnet.node.speed import read_bytes_per_s


def test_threads_read_memory_and_say_how_fast() -> None:
    assert read_bytes_per_s(2, buffer_bytes=2 << 20, measure_s=0.02) > 1e6


def test_rates_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    for text, wanted in (
        ("", 0),
        ("5MB", 5e6),
        ("5 mb/s".replace(" ", ""), 5e6),
        ("1.5KiB", 1536),
        ("800", 800),
    ):
        assert _size("download-limit", text) == wanted
    for text in ("fast", "0", "-1MB", "5MBit"):
        with pytest.raises(typer.Exit):
            _size("download-limit", text)
    assert "write it like 5MB" in capsys.readouterr().err
