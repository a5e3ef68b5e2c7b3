"""Drafts for slow links: tokens that are likely to come next, checked in one pass through the route. Pure.

A text often repeats what it said before, or what its prompt said: the tokens that followed the last ones when
they stood together earlier are a good guess. Over far links a pass costs its trips however many rows it has,
so guesses that hold are tokens without a trip. Near links are left alone: there a guess costs compute, which
is what other streams wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

GRAM = 3
"""Tokens that must have stood together before, for what followed them to be a guess."""
MOST_DRAFTS = 15
ALPHA = 0.15
REGROW = 1.05
"""How fast a trip may seem to have become longer, per step."""
FIRST_CHANCE = 0.7


class Lookup:
    """What followed the latest `GRAM` tokens the last time they stood together. Grows with the text, which
    the context bounds."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Where the text went on after these tokens, the last time."""
        self._next: int | None = None
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> bool | None:
        """Takes the next token: whether it was the guessed one, None where none was."""
        guess = self._next
        hit = None if guess is None else self._tokens[guess] == token
        self._tokens.append(token)
        last = tuple(self._tokens[-GRAM:])
        # A guess that holds goes on where it is: what it repeats is longer than what the table knows.
        self._next = guess + 1 if guess is not None and hit else self._after.get(last)
        if len(last) == GRAM:
            self._after[last] = len(self._tokens)
        return hit

    def draft(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may come next."""
        if self._next is None or count < 1:
            return ()
        return tuple(self._tokens[self._next : self._next + count])


@dataclass(frozen=True, slots=True)
class Policy:
    """When drafts are sent. The estimate is that a guess holds with one chance, each time anew."""

    least_share: float = 0.25
    """What the trips of a step must take, in parts of its compute; infinite: no drafts at all."""
    least_gain: float = 1.25
    """How much faster the stream must become by the estimate."""

    def far(self, pace: Pace, cost: Callable[[int], float]) -> bool:
        """Whether a step's trips take so long that there may be drafts."""
        alone = pace.compute_ms(1, cost)
        return not math.isinf(self.least_share) and pace.trip_ms >= self.least_share * alone

    def length(self, pace: Pace, cost: Callable[[int], float], most: int) -> int:
        """Drafts to send with the next token. `cost`: milliseconds of one of the stages by rows of a call."""
        best, best_rate = 0, self.least_gain / (pace.trip_ms + pace.compute_ms(1, cost))
        for count in range(1, most + 1):
            tokens = (1 - pace.chance ** (count + 1)) / (1 - pace.chance)
            rate = tokens / (pace.trip_ms + pace.compute_ms(count + 1, cost))
            if rate > best_rate:
                best, best_rate = count, rate
        return best


NEVER = Policy(least_share=math.inf)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a stream's steps take, as its results tell."""

    trip_ms: float = 0.0
    """Of a step, beyond what stages computed and waited: the least of late, for a busy machine makes a trip
    look long, and no machine makes it short."""
    scale: float = 0.0
    """Compute of all stages over that of the one whose costs are known."""
    batch: int = 1
    """Steps that run together."""
    chance: float = FIRST_CHANCE
    """That a guess holds."""

    def compute_ms(self, rows: int, cost: Callable[[int], float]) -> float:
        """Of a step with so many rows, if what runs beside it has as many."""
        return self.scale * cost(self.batch * rows)

    def after(self, trip_ms: float, compute_ms: float, batch: int, cost_ms: float) -> Pace:
        """Moved by a step; `cost_ms`: what the known stage was expected to take for it."""
        scale = compute_ms / max(cost_ms, 1e-6)
        if not self.scale:
            return replace(self, trip_ms=max(trip_ms, 0.0), scale=scale, batch=batch)
        return replace(
            self,
            trip_ms=max(min(trip_ms, self.trip_ms * REGROW), 0.0),
            scale=self.scale + ALPHA * (scale - self.scale),
            batch=batch,
        )

    def guessed(self, hit: bool) -> Pace:
        """Moved by a guess that held, or did not, whether it was sent or not."""
        chance = self.chance + ALPHA * (float(hit) - self.chance)
        return replace(self, chance=min(max(chance, 0.01), 0.99))
