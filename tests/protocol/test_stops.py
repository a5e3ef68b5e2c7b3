"""Stop strings: never shown, nothing before them lost, found however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.protocol.stops import StopMatcher

ALPHABET = st.sampled_from("ab#\nß水")
TEXTS = st.text(ALPHABET, max_size=40)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the match that is complete first, then the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            start, stop = min(starts)
            return text[:start], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        emit, hit = matcher.push(piece)
        out += emit
        assert hit == (matcher.hit is not None)
    return out + matcher.flush(), matcher.hit


@given(TEXTS, STOPS, st.data())
def test_any_cut_gives_the_definition(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops) == expected(text, stops)
    assert run(list(text), stops) == expected(text, stops)


@given(TEXTS, STOPS)
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for char in text:
        emit, hit = matcher.push(char)
        shown += emit
        if hit:
            return
        held = matcher.held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert len(held) < max(map(len, stops))


def test_a_stop_string_over_three_pieces() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("one <") == ("one ", False)
    assert matcher.push("en") == ("", False)
    assert matcher.push("d> two") == ("", True)
    assert matcher.hit == "<end>"
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_what_only_looked_like_a_stop_comes_back() -> None:
    matcher = StopMatcher(["abac"])
    assert matcher.push("aba") == ("", False)
    assert matcher.push("bac") == ("ab", True)


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).push("text") == ("text", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
