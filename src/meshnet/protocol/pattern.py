"""Regular expressions of JSON schemas as grammars over the text of a JSON string.

Only what Python's `re` and ECMAScript agree on: literals, classes, groups, alternatives, quantifiers, and
anchors at the ends. As in JSON Schema a pattern without anchors may match anywhere in the string.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshnet.protocol.gbnf import GrammarError, Rules, char_class, complement, either, literal, merged

CHAR = (
    '([^"\\\\\\x00-\\x1F] | "\\\\" (["\\\\/bfnrt] | "u" '
    "([0-9A-CE-Fa-ce-f] [0-9A-Fa-f]{3} | [dD] [0-7] [0-9A-Fa-f]{2})))"
)
"""One character of a JSON string, escaped or not; surrogates cannot be written."""

MAX_PATTERN_CHARS = 2048

Ranges = list[tuple[int, int]]
_DIGIT: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Ranges = [(9, 13), (32, 32)]
_CLASSES: dict[str, Ranges] = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    # Only ASCII: what lies beyond is a digit, letter or space to one engine and not to the other.
    "D": complement(_DIGIT, 127),
    "W": complement(_WORD, 127),
    "S": [(33, 126)],
}
_SHORTHANDS = tuple(f"\\{letter}" for letter in _CLASSES)
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_ANY = complement([(10, 10), (13, 13), (0x2028, 0x2029)])
_ESCAPES = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class _Node:
    """A piece of the grammar with the number of characters that it stands for (inf: no limit)."""

    text: str
    least: int
    most: float


def pattern_rule(rules: Rules, pattern: str, least: int = 0, most: float = math.inf) -> str:
    """What stands between the quotes of a JSON string that matches. Raises GrammarError.

    `least` and `most`: the length that the schema asks for; the pattern itself must imply it.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"the pattern has more than {MAX_PATTERN_CHARS} characters")
    options = _Parser(rules, pattern).alternatives()
    for option in options:
        if option.least < least or option.most > most:
            name = "minLength" if option.least < least else "maxLength"
            raise GrammarError(
                f"{name} together with a pattern that does not imply it cannot be held; count in the pattern"
            )
    return either(option.text for option in options)


class _Parser:
    def __init__(self, rules: Rules, pattern: str) -> None:
        self._rules = rules
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def alternatives(self) -> list[_Node]:
        """The alternatives of the whole pattern, each with what may stand before and after it."""
        anywhere = f"{self._rules.name(CHAR, 'char')}*"
        options = []
        while True:
            begins = self._take("^")
            node, ends = self._sequence(top=True)
            before, after = "" if begins else anywhere, "" if ends else anywhere
            most = node.most if begins and ends else math.inf
            text = " ".join(part for part in (before, node.text, after) if part)
            options.append(_Node(text or '""', node.least, most))
            if not self._take("|"):
                break
        if self._at < len(self._pattern):
            raise self._error(f"'{self._pattern[self._at]}' closes nothing")
        return options

    def _sequence(self, *, top: bool = False) -> tuple[_Node, bool]:
        parts: list[str] = []
        least, most, ends = 0, 0.0, False
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            if top and self._take("$"):
                if self._at < len(self._pattern) and self._pattern[self._at] != "|":
                    raise self._error("an anchor stands only at the ends of the pattern")
                ends = True
                break
            node = self._quantified()
            parts.append(node.text)
            least, most = least + node.least, most + node.most
        return _Node(" ".join(part for part in parts if part), least, most), ends

    def _quantified(self) -> _Node:
        node = self._atom()
        count = self._quantifier()
        if count is None:
            return node
        low, high = count
        if self._peek() in ("*", "+", "?") or (self._peek() == "{"):
            raise self._error("a quantifier follows a quantifier")
        if high is None and node.least == 0:
            raise self._error("something that may be empty is repeated without end")
        item = self._rules.name(node.text or '""', "part")
        most = math.inf if high is None else 0.0 if not high else high * node.most
        return _Node(self._rules.repeat(item, low, high), low * node.least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        char = self._peek()
        count: tuple[int, int | None]
        if char == "*":
            count = (0, None)
        elif char == "+":
            count = (1, None)
        elif char == "?":
            count = (0, 1)
        elif char == "{":
            count = self._braces()
            self._take("?")
            return count
        else:
            return None
        self._at += 1
        self._take("?")  # lazy: the same strings match
        return count

    def _braces(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(end, self._at)].partition(",")
        if end < 0 or not _number(low) or not (high == "" or _number(high)):
            raise self._error("'{' begins no quantifier; write it as \\{")
        self._at = end + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            raise self._error(f"{{{low},{high}}} is upside down")
        return least, most

    def _atom(self) -> _Node:
        char = self._pattern[self._at]
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return self._set(self._class())
        if char == ".":
            return self._set(_ANY)
        if char == "\\":
            return self._set(self._escape())
        if char in "^$":
            raise self._error("an anchor stands only at the ends of the pattern")
        if char in "*+?{}]":
            raise self._error(f"'{char}' must be escaped to stand for itself")
        return self._set([(ord(char), ord(char))])

    def _group(self) -> _Node:
        if self._take("?") and not self._take(":"):
            raise self._error("groups that look around, are named or set flags cannot be held")
        self._depth += 1
        if self._depth > 32:
            raise self._error("groups are nested too deeply")
        options = [self._sequence()[0]]
        while self._take("|"):
            options.append(self._sequence()[0])
        if not self._take(")"):
            raise self._error("a group is not closed")
        self._depth -= 1
        text = either(option.text or '""' for option in options)
        least, most = min(o.least for o in options), max(o.most for o in options)
        return _Node(text if len(options) > 1 else f"({text})", least, most)

    def _class(self) -> Ranges:
        negated = self._take("^")
        if self._peek() == "]":
            raise self._error("']' at the start of a class must be escaped")
        ranges: Ranges = []
        shorthand = False
        while not self._take("]"):
            if self._at >= len(self._pattern):
                raise self._error("a class is not closed")
            shorthand = shorthand or self._pattern[self._at : self._at + 2] in _SHORTHANDS
            first = self._class_item()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._class_item()
                if (
                    len(first) != 1
                    or len(last) != 1
                    or first[0][0] != first[0][1]
                    or last[0][0] != last[0][1]
                ):
                    raise self._error("a range in a class goes from one character to another")
                if last[0][0] < first[0][0]:
                    raise self._error("a range in a class is upside down")
                first = [(first[0][0], last[0][0])]
            ranges += first
        if not negated:
            return merged(ranges)
        return complement([*ranges, (0, 31)], 127) if shorthand else complement(ranges)

    def _class_item(self) -> Ranges:
        char = self._pattern[self._at]
        self._at += 1
        return self._escape(in_class=True) if char == "\\" else [(ord(char), ord(char))]

    def _escape(self, *, in_class: bool = False) -> Ranges:
        char = self._peek()
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS:
            return [(_CONTROLS[char], _CONTROLS[char])]
        if char in ("x", "u"):
            size = 2 if char == "x" else 4
            digits = self._pattern[self._at : self._at + size]
            if len(digits) == size and all(d in "0123456789abcdefABCDEF" for d in digits):
                self._at += size
                return [(int(digits, 16), int(digits, 16))]
        if not char or (char.isascii() and char.isalnum()) or (in_class and char == "b"):
            raise self._error(f"the escape '\\{char}' cannot be held")
        return [(ord(char), ord(char))]

    def _set(self, ranges: Ranges) -> _Node:
        """One character of the set, as it is written in JSON."""
        allowed = complement([*complement(ranges), _SURROGATES])
        plain = complement([*complement(allowed), (0, 31), (34, 34), (92, 92)])
        options = [char_class(plain)] if plain else []
        if len(plain) == 1 and plain[0][0] == plain[0][1]:
            options = [literal(chr(plain[0][0]))]
        for low, high in allowed:
            escaped = [*range(low, min(high, 31) + 1), *(p for p in (34, 92) if low <= p <= high)]
            options += [literal(_ESCAPES.get(point, f"\\u{point:04x}")) for point in escaped]
        if not options:
            raise self._error("a set of characters is empty")
        return _Node(either(options), 1, 1)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _error(self, why: str) -> GrammarError:
        return GrammarError(
            f"the pattern cannot be held: {why} (at character {self._at} of '{self._pattern}')"
        )


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
