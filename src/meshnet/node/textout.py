"""One choice's tokens as text: characters never cut, stop strings never shown, logprobs in OpenAI's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.engine.tokenizer import Tokenizer
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.stops import StopMatcher

Logprob = tuple[str, float, tuple[int, ...], tuple[tuple[str, float, tuple[int, ...]], ...]]
"""(piece, logprob, bytes, alternatives as (piece, logprob, bytes)); as in `calls.TokenEvent.lp`."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a token lets be shown, and whether it completed a stop string."""

    text: str
    stopped: bool


class TextOut:
    """Feed every token once, in order; replayed ones too, whose text was shown before."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, show_control: bool) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._decoder = tokenizer.stream(special=show_control)
        self._stops = StopMatcher(stops)

    def push(self, token: int) -> Shown:
        text, stopped = self._stops.push(self._decoder.push(token))
        return Shown(text, stopped)

    def flush(self) -> str:
        """The answer ended otherwise than at a stop string: what was held back belongs to it."""
        return self._stops.flush()

    def logprob(self, token: pb.Token) -> Logprob:
        top = tuple((*self._piece(other.token), other.logprob) for other in token.top)
        piece, raw = self._piece(token.token)
        return piece, token.logprob, raw, tuple((text, value, data) for text, data, value in top)

    def _piece(self, token: int) -> tuple[str, tuple[int, ...]]:
        raw = self._tokenizer.piece(token, special=True)
        return raw.decode("utf-8", "replace"), tuple(raw)
