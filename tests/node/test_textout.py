"""Tokens as text: characters whole, stop strings unseen."""

from __future__ import annotations

from meshnet.engine.tokenizer import Tokenizer
from meshnet.node.textout import TextOut


def test_a_limit_inside_a_character_shows_nothing_of_it(tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in tokenizer.encode("so 🎉", special=False)]
    whole = TextOut(tokenizer, (), show_control=False)
    assert "".join(whole.push(token).text for token in tokens) + whole.flush() == "so 🎉"
    cut = TextOut(tokenizer, (), show_control=False)
    shown = "".join(cut.push(token).text for token in tokens[:-1]) + cut.flush()
    assert shown.rstrip() == "so"


def test_the_beginning_of_a_stop_string_that_never_came_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in tokenizer.encode("one two", special=False)]
    out = TextOut(tokenizer, ("two three",), show_control=False)
    pushed = [out.push(token) for token in tokens]
    assert "".join(each.text for each in pushed).rstrip() == "one"
    assert "".join(each.text for each in pushed) + out.flush() == "one two"
    assert not any(each.stopped for each in pushed)
