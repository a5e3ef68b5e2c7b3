"""Two JSON schemas that must both hold, as one; and whether two can never both hold."""

from __future__ import annotations

from typing import Any

from meshnet.protocol.errors import SchemaError
from meshnet.protocol.schema_shape import TYPES
from meshnet.protocol.schema_values import equal, type_of

ANNOTATIONS = frozenset(
    [
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$schema", "$id", "$comment", "$defs", "definitions"),
    ]
)
_LARGER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems"))
_SMALLER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems"))


def merge(a: Any, b: Any, path: str, keyword: str) -> Any:
    """A schema for what validates against `a` and `b`. Raises SchemaError blaming `keyword` at `path`."""
    if a is True or a == {}:
        return b
    if b is True or b == {}:
        return a
    if a is False or b is False:
        return False
    joined = {**b, **a}
    for key in a.keys() & b.keys():
        if key not in ANNOTATIONS and not equal(a[key], b[key]):
            joined[key] = _both(key, a[key], b[key], path, keyword)
    if "prefixItems" in joined and ("items" in a) != ("items" in b):
        raise SchemaError(f"{keyword} with items on one side and prefixItems cannot be held", path, keyword)
    _merge_properties(a, b, joined, path, keyword)
    return joined


def _both(key: str, a: Any, b: Any, path: str, keyword: str) -> Any:
    if key in _LARGER:
        return max(a, b)
    if key in _SMALLER:
        return min(a, b)
    if key == "required":
        return list(dict.fromkeys([*a, *b]))
    if key == "allOf":
        return [*a, *b]
    if key == "items":
        return merge(a, b, path, keyword)
    if key == "type":
        common = [kind for kind in TYPES if _admits(a, kind) and _admits(b, kind)]
        if not common:
            raise SchemaError(f"no type is allowed on both sides of {keyword}", path, keyword)
        return common
    if key == "enum":
        return [value for value in a if any(equal(value, other) for other in b)]
    if key in ("properties", "additionalProperties"):
        return a  # by _merge_properties
    raise SchemaError(f"{keyword} with '{key}' on both sides cannot be held", path, keyword)


def _merge_properties(
    a: dict[str, Any], b: dict[str, Any], joined: dict[str, Any], path: str, keyword: str
) -> None:
    """A property that one side does not name falls under that side's additionalProperties."""
    ours, theirs = a.get("properties", {}), b.get("properties", {})
    rest_a, rest_b = a.get("additionalProperties", True), b.get("additionalProperties", True)
    if ours or theirs:
        joined["properties"] = {
            name: merge(ours.get(name, rest_a), theirs.get(name, rest_b), path, keyword)
            for name in [*ours, *(name for name in theirs if name not in ours)]
        }
    if "additionalProperties" in a or "additionalProperties" in b:
        joined["additionalProperties"] = merge(rest_a, rest_b, path, keyword)


def exclusive(a: Any, b: Any) -> bool:
    """Whether nothing that a grammar writes for `a` validates against `b`, shown by types or constants."""
    if a is False or b is False:
        return True
    if a is True or b is True:
        return False
    common = [kind for kind in TYPES if kind in types_of(a) and _overlaps(kind, types_of(b))]
    if not common:
        return True
    ours, theirs = _values(a), _values(b)
    if ours is not None and theirs is not None:
        return _disjoint(ours, theirs)
    if set(common) != {"object"}:
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    for name in shared:
        one = _values(a.get("properties", {}).get(name, True))
        two = _values(b.get("properties", {}).get(name, True))
        if one is not None and two is not None and _disjoint(one, two):
            return True
    return False


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """The types that a schema allows as far as it says so itself."""
    values = _values(schema)
    if values is not None:
        return frozenset(type_of(value) for value in values)
    kinds = schema.get("type", TYPES)
    return frozenset([kinds] if isinstance(kinds, str) else kinds)


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _disjoint(a: list[Any], b: list[Any]) -> bool:
    return not any(equal(one, two) for one in a for two in b)


def _admits(types: Any, kind: str) -> bool:
    kinds = [types] if isinstance(types, str) else types
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _overlaps(kind: str, kinds: frozenset[str]) -> bool:
    if kind in ("number", "integer"):
        return bool(kinds & {"number", "integer"})
    return kind in kinds
