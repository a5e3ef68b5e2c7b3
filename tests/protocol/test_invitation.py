"""Join links: what is made can be read, and what is broken is said without giving the token away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.protocol.invitation import Invitation, InvitationError, parse_link

TEXT = st.text("abcXYZ019-_", min_size=1, max_size=40)


@given(st.sampled_from(["192.168.1.10", "box.local", "fd00::1"]), st.integers(1, 65535), TEXT, TEXT)
def test_a_link_round_trips(host: str, port: int, mesh: str, token: str) -> None:
    made = Invitation(host, port, mesh, token)
    assert parse_link(made.link()) == made
    assert made.tracker.startswith("http://")


@pytest.mark.parametrize(
    ("link", "word"),
    [
        ("http://a:1/m?token=secret", "begins with"),
        ("meshnet://:8080/m?token=secret", "host"),
        ("meshnet://a/m?token=secret", "port"),
        ("meshnet://a:99999/m?token=secret", "address"),
        ("meshnet://a:8080?token=secret", "mesh"),
        ("meshnet://a:8080/m", "token"),
        ("meshnet:secret", "host"),
    ],
)
def test_a_broken_link_says_what_is_missing(link: str, word: str) -> None:
    with pytest.raises(InvitationError, match=word) as caught:
        parse_link(link)
    assert "secret" not in str(caught.value)
    assert "meshnet invite" in str(caught.value)
