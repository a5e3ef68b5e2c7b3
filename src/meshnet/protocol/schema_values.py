"""JSON values: equality, types, and the keywords of a schema that a single value can be tried against."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec

from meshnet.protocol.schema_formats import FORMATS


def equal(a: Any, b: Any) -> bool:
    """JSON's equality: true is not 1, while 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if isinstance(a, (list, dict)) and isinstance(b, (list, dict)):
        return _canonical(a) == _canonical(b)
    return type(a) is type(b) and bool(a == b)


def type_of(value: Any) -> str:
    """The JSON type; integers are `number` here."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def exact(number: float) -> Fraction:
    """The decimal that was written (0.1, not the double next to it)."""
    return Fraction(repr(number))


def holds(value: Any, keyword: str, asked: Any) -> bool:
    """Whether the value validates against one keyword of `TRIED`. Raises ValueError for a misused keyword."""
    kind, fits, check = TRIED[keyword]
    if not fits(asked):
        raise ValueError(f"'{keyword}' cannot be {asked!r}")
    return (kind is not None and type_of(value) != kind) or check(value, asked)


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(_whole(value), order="deterministic")


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def _of_type(value: Any, asked: Any) -> bool:
    kinds = [asked] if isinstance(asked, str) else asked
    kind = type_of(value)
    return kind in kinds or (kind == "number" and "integer" in kinds and float(value).is_integer())


def _unique(value: list[Any], asked: bool) -> bool:
    return not asked or len({_canonical([item]) for item in value}) == len(value)


def _multiple(value: float, asked: float) -> bool:
    return (exact(value) / exact(asked)).denominator == 1


def _number(asked: Any) -> bool:
    return type_of(asked) == "number"


def _count(asked: Any) -> bool:
    return isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0


def _anything(_asked: Any) -> bool:
    return True


TRIED: dict[str, tuple[str | None, Callable[[Any], bool], Callable[[Any, Any], bool]]] = {
    "type": (None, _anything, _of_type),
    "const": (None, _anything, equal),
    "enum": (None, _anything, lambda value, asked: any(equal(value, one) for one in asked)),
    "minimum": ("number", _number, lambda value, asked: bool(value >= asked)),
    "maximum": ("number", _number, lambda value, asked: bool(value <= asked)),
    "exclusiveMinimum": ("number", _number, lambda value, asked: bool(value > asked)),
    "exclusiveMaximum": ("number", _number, lambda value, asked: bool(value < asked)),
    "multipleOf": ("number", lambda asked: _number(asked) and asked > 0, _multiple),
    "minLength": ("string", _count, lambda value, asked: len(value) >= asked),
    "maxLength": ("string", _count, lambda value, asked: len(value) <= asked),
    "format": ("string", FORMATS.__contains__, lambda text, asked: bool(re.search(FORMATS[asked], text))),
    "minItems": ("array", _count, lambda value, asked: len(value) >= asked),
    "maxItems": ("array", _count, lambda value, asked: len(value) <= asked),
    "uniqueItems": ("array", lambda asked: isinstance(asked, bool), _unique),
    "minProperties": ("object", _count, lambda value, asked: len(value) >= asked),
    "maxProperties": ("object", _count, lambda value, asked: len(value) <= asked),
    "required": ("object", _anything, lambda value, asked: all(name in value for name in asked)),
}
"""Keyword: the type it speaks of (None: any), whether what it asks makes sense, whether the value holds it.
Patterns are not among them: Python's `re` takes for ever over some."""
