"""An independent reading of llama.cpp's grammar notation: parses its text and writes random sentences."""

from __future__ import annotations

import random
import re
from typing import Any

Node = tuple[Any, ...]
"""("text", str) | ("set", [(lo, hi)], negated) | ("ref", name) | ("alt", [seq]) | ("rep", node, lo, hi)"""

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_HEX = {"x": 2, "u": 4, "U": 8}


class Grammar:
    def __init__(self, text: str) -> None:
        self.rules: dict[str, Node] = {}
        for line in text.splitlines():
            name, found, body = line.partition(" ::= ")
            if not found:
                raise ValueError(f"not a rule: {line!r}")
            node, at = self._alternatives(body, 0)
            if at != len(body):
                raise ValueError(f"left over in {name}: {body[at:]!r}")
            self.rules[name] = node
        self.cost = self._costs()

    # ---- reading

    def _alternatives(self, s: str, at: int) -> tuple[Node, int]:
        options = []
        while True:
            sequence, at = self._sequence(s, at)
            options.append(sequence)
            if at >= len(s) or s[at] != "|":
                return ("alt", options), at
            at += 1

    def _sequence(self, s: str, at: int) -> tuple[list[Node], int]:
        out: list[Node] = []
        while True:
            while at < len(s) and s[at] == " ":
                at += 1
            if at >= len(s) or s[at] in "|)":
                return out, at
            node, at = self._item(s, at)
            if at < len(s) and s[at] in "*+?":
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[s[at]]
                node, at = ("rep", node, low, high), at + 1
            elif match := _COUNT.match(s, at):
                low = int(match[1])
                high = low if not match[2] else int(match[3]) if match[3] else None
                node, at = ("rep", node, low, high), match.end()
            out.append(node)

    def _item(self, s: str, at: int) -> tuple[Node, int]:
        if s[at] == '"':
            chars, at = [], at + 1
            while s[at] != '"':
                char, at = self._char(s, at)
                chars.append(char)
            return ("text", "".join(map(chr, chars))), at + 1
        if s[at] == "[":
            at += 1
            negated = s[at] == "^"
            at += negated
            ranges = []
            while s[at] != "]":
                low, at = self._char(s, at)
                high = low
                if s[at] == "-" and s[at + 1] != "]":
                    high, at = self._char(s, at + 1)
                ranges.append((low, high))
            return ("set", ranges, negated), at + 1
        if s[at] == "(":
            node, at = self._alternatives(s, at + 1)
            if s[at] != ")":
                raise ValueError(f"group not closed in {s!r}")
            return node, at + 1
        match = _NAME.match(s, at)
        if match is None:
            raise ValueError(f"cannot read {s[at:]!r}")
        return ("ref", match.group()), match.end()

    def _char(self, s: str, at: int) -> tuple[int, int]:
        if s[at] != "\\":
            return ord(s[at]), at + 1
        kind = s[at + 1]
        if kind in _HEX:
            end = at + 2 + _HEX[kind]
            return int(s[at + 2 : end], 16), end
        return ord({"n": "\n", "r": "\r", "t": "\t"}.get(kind, kind)), at + 2

    # ---- writing

    def _costs(self) -> dict[str, float]:
        """The depth of the shallowest sentence of each rule, so that writing can be made to end."""
        cost = dict.fromkeys(self.rules, float("inf"))
        while True:
            new = {name: self._depth(node, cost) + 1 for name, node in self.rules.items()}
            if new == cost:
                return cost
            cost = new

    def _depth(self, node: Node, cost: dict[str, float]) -> float:
        if node[0] == "ref":
            return cost[node[1]]
        if node[0] == "alt":
            return min(max((self._depth(n, cost) for n in seq), default=0) for seq in node[1])
        if node[0] == "rep":
            return self._depth(node[1], cost) if node[2] else 0
        return 0

    def sample(self, rng: random.Random, budget: int = 40) -> str:
        out: list[str] = []
        self._write(("ref", "root"), rng, out, budget)
        return "".join(out)

    def _write(self, node: Node, rng: random.Random, out: list[str], budget: int) -> None:
        kind = node[0]
        if kind == "text":
            out.append(node[1])
        elif kind == "set":
            out.append(_pick(rng, node[1], node[2]))
        elif kind == "ref":
            if node[1] not in self.rules:
                raise ValueError(f"no rule named {node[1]}")
            self._write(self.rules[node[1]], rng, out, budget - 1)
        elif kind == "rep":
            low, high = node[2], node[3]
            most = low + rng.choice((0, 1, 2, 5)) if budget > 0 else low
            for _ in range(
                most if high is None else min(most, high) if rng.random() < 0.8 or budget < 0 else high
            ):
                self._write(node[1], rng, out, budget - 1)
        else:
            options = node[1]
            if budget <= 0:
                depths = [max((self._depth(n, self.cost) for n in seq), default=0) for seq in options]
                options = [o for o, d in zip(options, depths, strict=True) if d == min(depths)]
            for part in rng.choice(options):
                self._write(part, rng, out, budget - 1)


_TASTE = 'aZ09 _-.,:{}[]"\\/\n\t\x7féß水😀'


def _pick(rng: random.Random, ranges: list[tuple[int, int]], negated: bool) -> str:
    def member(point: int) -> bool:
        return any(low <= point <= high for low, high in ranges) != negated

    liked = [char for char in _TASTE if member(ord(char))]
    if negated or (liked and rng.random() < 0.3):
        while not liked or rng.random() < 0.3:
            point = rng.choice(
                (rng.randrange(32, 127), rng.randrange(0xA0, 0x3000), rng.randrange(0x1F300, 0x1F600))
            )
            if member(point):
                return chr(point)
        return rng.choice(liked)
    low, high = rng.choice(ranges)
    point = rng.choice((low, high, rng.randint(low, high)))
    return chr(point) if not 0xD800 <= point <= 0xDFFF else chr(low)
