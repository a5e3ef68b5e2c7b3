"""Checks of values that come from outside: each refuses with the field's name and the value."""

# ruff: noqa: TRY004 - a value of the wrong type is bad input like any other: ValueError throughout

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

LayerRange = tuple[int, int]
"""The first and the last layer of a range, both inclusive."""


MOST_LAYERS = 1_024
"""More layers than any model has: a range beyond is a mistake, and planning time grows with the layers."""


def number(field: str, value: object) -> float:
    """A finite number of at least 0; ValueError otherwise (a boolean is not a number)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number, got {value!r}")
    try:
        result = float(value)
    except OverflowError:
        raise ValueError(f"{field} must be a finite number, got an integer beyond 1e308") from None
    if not math.isfinite(result):
        raise ValueError(f"{field} must be a finite number, got {value!r}")
    if result < 0:
        raise ValueError(f"{field} must not be negative, got {value!r}")
    return result


def positive(field: str, value: object) -> float:
    """A finite number above 0; ValueError otherwise."""
    result = number(field, value)
    if result == 0:
        raise ValueError(f"{field} must be above 0, got {value!r}")
    return result


def whole(field: str, value: object, minimum: int = 0) -> int:
    """An integer of at least `minimum`; ValueError otherwise (a boolean is not an integer)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{field} must be at least {minimum}, got {value!r}")
    return value


def flag(field: str, value: object) -> bool:
    """A boolean; ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, got {value!r}")
    return value


def name(field: str, value: object) -> str:
    """A string that is not empty; ValueError otherwise."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a string that is not empty, got {value!r}")
    return value


def names(field: str, value: object) -> tuple[str, ...]:
    """A sequence of strings that are not empty; ValueError otherwise."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field} must be a list of names, got {value!r}")
    return tuple(name(field, item) for item in value)


def layer_range(field: str, value: object) -> LayerRange:
    """A pair of layers (first, last) with 0 <= first <= last < MOST_LAYERS; ValueError otherwise."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{field} must be a pair of layers (first, last), got {value!r}")
    pair = tuple(value)
    if len(pair) != 2:
        raise ValueError(f"{field} must be a pair of layers (first, last), got {value!r}")
    first, last = pair
    for layer in pair:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"{field} must hold integers, got {value!r}")
        if layer < 0:
            raise ValueError(f"{field} must not hold negative layers, got {value!r}")
    if last >= MOST_LAYERS or first >= MOST_LAYERS:
        raise ValueError(f"{field} must stay below layer {MOST_LAYERS}, got {value!r}")
    if first > last:
        raise ValueError(f"{field} is reversed or empty: the first layer is above the last in {value!r}")
    return first, last


def layer_ranges(field: str, value: object) -> tuple[LayerRange, ...]:
    """A sequence of layer ranges; ValueError otherwise."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{field} must be a list of pairs (first, last), got {value!r}")
    return tuple(layer_range(field, item) for item in value)


def mapping(what: str, value: object) -> None:
    """ValueError unless `value` is an object of names and values."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object of names and values, got {value!r}")


def known_keys(what: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """ValueError when `given` has a key that is not among `known`."""
    names = tuple(known)
    for key, value in given.items():
        if key not in names:
            raise ValueError(f"unknown {what} {key!r} (value {value!r}): known are {', '.join(names)}")
