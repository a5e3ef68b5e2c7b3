"""Whether a value has the shape of a JSON schema, as far as the keywords that grammars hold.

jsonschema's own check against the meta-schema takes tens of milliseconds for a larger schema, and this runs
on the event loop that streams everybody's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from meshnet.protocol.errors import SchemaError

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def check_shape(schema: Any, path: str = "") -> None:
    """Raises SchemaError with the keyword and where it stands."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(f"a schema is an object or a boolean, not {_shown(schema)}", path)
    for keyword, value in schema.items():
        known = _SHAPES.get(keyword)
        if known is not None and not known[0](value):
            raise SchemaError(
                f"'{keyword}' must be {known[1]}, not {_shown(value)}", f"{path}/{keyword}", keyword
            )
        if keyword in _NAMED:
            for name, part in value.items():
                check_shape(part, f"{path}/{keyword}/{step(name)}")
        elif keyword in _LISTED:
            for index, part in enumerate(value):
                check_shape(part, f"{path}/{keyword}/{index}")
        elif keyword in _SINGLE:
            check_shape(value, f"{path}/{keyword}")


def step(name: str) -> str:
    """A key as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _type(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(item in TYPES for item in value) and len(set(value)) == len(value)
    return value in TYPES


_NAMED = frozenset(("properties", "$defs", "definitions"))
_LISTED = frozenset(("prefixItems", "anyOf", "oneOf", "allOf"))
_SINGLE = frozenset(("items", "additionalProperties"))
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (_filled, "a list of values"),
    "required": (_texts, "a list of names"),
    **dict.fromkeys(_NAMED, (_object, "an object of schemas")),
    **dict.fromkeys(_LISTED, (_filled, "a list of schemas")),
    "items": (_schema, "a schema (for a list of them, use prefixItems)"),
    "additionalProperties": (_schema, "a schema or a boolean"),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), (_count, "a whole number >= 0")),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_number, "a finite number")
    ),
    **dict.fromkeys(("pattern", "format", "$ref", "$schema", "$id"), (_text, "a string")),
}
