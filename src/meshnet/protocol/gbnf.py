"""Writing llama.cpp's grammar notation (GBNF): quoting, repetition, numbers within bounds.

Expressions are strings that can stand anywhere in a rule's body. A grammar here may allow less than what
was asked for (a float has at most 15 digits, say), never more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_REPEAT = 100_000
_INT_DIGITS = 15
_WHOLE_DIGITS = 9
"""With `_FRACTION_DIGITS` 15 in all: so many digits survive the way through a double unchanged, so two
different numbers of this form never become one (which matters to exclusive bounds)."""
_FRACTION_DIGITS = 6
_UNIT = 10**_FRACTION_DIGITS


class GrammarError(ValueError):
    """No grammar holds this; the message says what and why, in a sentence without its full stop."""


class Rules:
    """The named rules of one grammar. Equal bodies get one rule."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._size = 0

    def name(self, body: str, hint: str = "r") -> str:
        """The name of the rule with this body."""
        known = self._names.get(body)
        if known is None:
            known = self._names[body] = self.reserve(hint)
            self.define(known, body)
        return known

    def reserve(self, hint: str) -> str:
        """A new name, whose body `define` gives later: for rules that name themselves."""
        name = f"{hint}-{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._size += len(name) + len(body) + 6
        if self._size > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"the grammar gets larger than {MAX_GRAMMAR_CHARS // 1024} KiB")
        self._bodies[name] = body

    def text(self, root: str) -> str:
        """The whole grammar; `root` is the body of its root rule."""
        lines = [f"root ::= {root}"]
        lines += [f"{name} ::= {body}" for name, body in self._bodies.items()]
        return "\n".join(lines) + "\n"

    def repeat(self, item: str, low: int, high: int | None) -> str:
        """`item` (a rule's name or one group) low to high times; None: without end.

        Large counts become counts of blocks, because llama.cpp writes every repetition out.
        """
        if high is None:
            return f"{self._exactly(item, low)} {item}*".strip() if low else f"{item}*"
        if high > MAX_REPEAT:
            raise GrammarError(f"a count of {high} is too large for a grammar (at most {MAX_REPEAT})")
        return f"{self._exactly(item, low)} {self._at_most(item, high - low)}".strip()

    def _exactly(self, item: str, count: int) -> str:
        if count <= 64:
            return "" if not count else item if count == 1 else f"{item}{{{count}}}"
        size = math.isqrt(count)
        block = self.name(f"{item}{{{size}}}", "block")
        return f"{self._exactly(block, count // size)} {self._exactly(item, count % size)}".strip()

    def _at_most(self, item: str, count: int) -> str:
        if count <= 64:
            return "" if not count else f"{item}?" if count == 1 else f"{item}{{0,{count}}}"
        size = math.isqrt(count)
        block = self.name(f"{item}{{{size}}}", "block")
        # blocks * size + rest = count exactly, and rest + 1 >= size leaves no number of items out.
        blocks = (count - size + 1) // size
        return f"{self._at_most(block, blocks)} {self._at_most(item, count - blocks * size)}".strip()


def literal(text: str) -> str:
    """The terminal that stands for exactly this text."""
    return '"' + "".join(_quoted(char) for char in text) + '"'


def _quoted(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if 32 <= ord(char) < 127 else _code(ord(char))


def char_class(ranges: Sequence[tuple[int, int]]) -> str:
    """One character out of inclusive ranges of code points."""
    if not ranges:
        raise GrammarError("a set of characters is empty")
    parts = [_class_char(a) if a == b else f"{_class_char(a)}-{_class_char(b)}" for a, b in ranges]
    return f"[{''.join(parts)}]"


def _class_char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else _code(point)


def _code(point: int) -> str:
    if point < 0x80:
        return f"\\x{point:02X}"
    return f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


def either(options: Iterable[str]) -> str:
    """A group of alternatives; one alone stays as it is."""
    unique = list(dict.fromkeys(options))
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


# ---------------------------------------------------------------- integers


@functools.lru_cache(maxsize=256)
def integer(low: int | None = None, high: int | None = None) -> str:
    """Integers from low to high (None: as far as 15 digits go), without leading zeros."""
    if low is None and high is None:
        return f'"-"? ("0" | [1-9] [0-9]{{0,{_INT_DIGITS - 1}}})'
    limit = 10**_INT_DIGITS - 1
    low = -limit if low is None else low
    high = limit if high is None else high
    if low > high:
        raise GrammarError(f"no integer lies between {low} and {high}")
    low, high = max(low, -(10**18)), min(high, 10**18)
    if low > high:
        raise GrammarError("integers beyond 18 digits are too large for a grammar")
    options = []
    if low < 0:
        options.append(f'"-" {_whole(max(1, -high), -low)}')
    if high >= 0:
        options.append(_whole(max(0, low), high))
    return either(options)


def _whole(low: int, high: int) -> str:
    """Integers 0 <= low .. high."""
    options = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = min(high, 10**digits - 1)
        options.append(_same_length(str(first), str(last)))
    return either(options)


def _same_length(low: str, high: str) -> str:
    """Digit strings of one length from low to high."""
    rest = len(low) - 1
    if low[0] == "0" and high[0] == "9" and not low.strip("0") and not high.strip("9"):
        return _digits(rest + 1, rest + 1)
    if rest == 0:
        return _digit(low, high)
    if low[0] == high[0]:
        return f'"{low[0]}" {_same_length(low[1:], high[1:])}'
    first, last = int(low[0]), int(high[0])
    options = []
    if low[1:].strip("0"):
        options.append(f'"{first}" {_same_length(low[1:], "9" * rest)}')
        first += 1
    upper = ""
    if high[1:].strip("9"):
        upper = f'"{last}" {_same_length("0" * rest, high[1:])}'
        last -= 1
    if first <= last:
        options.append(f"{_digit(str(first), str(last))} {_digits(rest, rest)}")
    if upper:
        options.append(upper)
    return either(options)


def _digit(low: str, high: str) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"


def _digits(least: int, most: int) -> str:
    if least == most:
        return "[0-9]" if most == 1 else f"[0-9]{{{most}}}"
    return f"[0-9]{{{least},{most}}}"


# ---------------------------------------------------------------- numbers

NUMBER = '("-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?)'
"""Any number; the exponent is kept small enough for a double."""


@functools.lru_cache(maxsize=256)
def number(low: Fraction | None, high: Fraction | None, *, above: bool = False, below: bool = False) -> str:
    """Decimal numbers within bounds; `above` and `below`: the bound itself is out. None: no bound."""
    if low is None and high is None:
        return NUMBER
    limit = 10**_WHOLE_DIGITS
    if (low is not None and low >= limit) or (high is not None and high <= -limit):
        return integer(_inner(low, 1, above), _outer(high, 1, below))
    first = -limit * _UNIT + 1 if low is None else max(_inner(low, _UNIT, above) or 0, -limit * _UNIT + 1)
    last = limit * _UNIT - 1 if high is None else min(_outer(high, _UNIT, below) or 0, limit * _UNIT - 1)
    if first > last:
        raise GrammarError(f"no number of {_FRACTION_DIGITS} decimals lies within the bounds")
    options = []
    if first < 0:
        options.append(f'"-" {_decimal(max(0, -last), -first)}')
    if last >= 0:
        options.append(_decimal(max(0, first), last))
    return either(options)


def _inner(low: Fraction | None, unit: int, exclusive: bool) -> int | None:
    """The smallest whole number of 1/unit that is not below `low`."""
    if low is None:
        return None
    scaled = math.ceil(low * unit)
    return scaled + 1 if exclusive and scaled == low * unit else scaled


def _outer(high: Fraction | None, unit: int, exclusive: bool) -> int | None:
    """The largest whole number of 1/unit that is not above `high`."""
    if high is None:
        return None
    scaled = math.floor(high * unit)
    return scaled - 1 if exclusive and scaled == high * unit else scaled


def _decimal(low: int, high: int) -> str:
    """Numbers >= 0 whose value in units of 10^-6 lies from low to high."""
    (a, fa), (b, fb) = divmod(low, _UNIT), divmod(high, _UNIT)
    top = _UNIT - 1
    if a == b:
        return f'"{a}" {_fraction(fa, fb)}'.strip()
    options = []
    if fa:
        options.append(f'"{a}" {_fraction(fa, top)}')
        a += 1
    upper = ""
    if fb != top:
        upper = f'"{b}" {_fraction(0, fb)}'.strip()
        b -= 1
    if a <= b:
        options.append(f"{_whole(a, b)} {_fraction(0, top)}")
    if upper:
        options.append(upper)
    return either(options)


def _fraction(low: int, high: int) -> str:
    """The point and digits of a fraction from low to high (in 10^-6), nothing at all where that is 0."""
    if high == 0:
        return '("." "0"{1,6})?'
    width = _FRACTION_DIGITS
    body = f'("." {_fraction_digits(f"{low:0{width}d}", f"{high:0{width}d}")})'
    return body if low else body + "?"


def _fraction_digits(low: str, high: str) -> str:
    """Digit strings of 1 to len(low) digits that lie from low to high once zeros are added on the right."""
    rest = len(low) - 1
    if not low.strip("0") and not high.strip("9"):
        return _digits(1, rest + 1)
    if rest == 0:
        return _digit(low, high)
    cuts = [(low[0], low[1:], high[1:])] if low[0] == high[0] else None
    if cuts is None:
        cuts = [(low[0], low[1:], "9" * rest), (high[0], "0" * rest, high[1:])]
    options = []
    for digit, least, most in cuts:
        # Leaving the rest out means zeros.
        tail = f"({_fraction_digits(least, most)})"
        options.append(f'"{digit}" {tail}' + ("" if least.strip("0") else "?"))
    first, last = int(low[0]) + 1, int(high[0]) - 1
    if first <= last:
        options.insert(1, f"{_digit(str(first), str(last))} {_digits(0, rest)}")
    return either(options)


def complement(ranges: Sequence[tuple[int, int]], last: int = 0x10FFFF) -> list[tuple[int, int]]:
    """All code points up to `last` that are in none of the ranges."""
    edges = [(-1, -1), *merged(ranges), (last + 1, last + 1)]
    return [(a[1] + 1, b[0] - 1) for a, b in pairwise(edges) if a[1] + 1 <= b[0] - 1]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, without overlaps."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out
