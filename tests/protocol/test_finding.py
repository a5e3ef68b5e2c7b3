"""Which tracker of a network a node takes."""

from __future__ import annotations

import pytest

from meshnet.protocol.finding import FoundTracker, NotChosen, choose, found_tracker

HOME = FoundTracker("home", "m1", "https://10.0.0.1:8080", "0.1.0")
HOME_TOO = FoundTracker("home", "m1", "https://10.0.0.2:8080", "0.1.0")
OFFICE = FoundTracker("office", "m2", "http://10.0.0.3:8080", "0.1.0")


def test_what_a_tracker_says_becomes_an_address() -> None:
    told = {"mesh": "m1", "name": "ho\x1bme", "tls": "1", "version": "0.1.0"}
    assert found_tracker(told, ["10.0.0.1"], 8080) == HOME
    assert found_tracker({**told, "tls": "0"}, ["fe80::1"], 8080) == FoundTracker(
        "home", "m1", "http://[fe80::1]:8080", "0.1.0"
    )
    assert found_tracker({"name": "printer"}, ["10.0.0.1"], 631) is None
    assert found_tracker(told, [], 8080) is None


def test_the_only_mesh_is_taken_and_several_are_listed() -> None:
    assert choose([HOME, HOME_TOO], "") is HOME
    assert choose([HOME, OFFICE], "office") is OFFICE
    assert choose([HOME, OFFICE], "m1") is HOME
    with pytest.raises(NotChosen, match=r"several meshes.*home m1 at .*office m2 at .*--mesh"):
        choose([HOME, OFFICE], "")
    with pytest.raises(NotChosen, match=r"--mesh cabin: only home m1 at"):
        choose([HOME], "cabin")
    with pytest.raises(NotChosen, match=r"no tracker answers.*meshnet invite"):
        choose([], "")
