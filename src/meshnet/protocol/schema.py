"""JSON schemas as grammars: what a grammar made here lets end always validates against the schema.

A keyword that a grammar cannot hold is refused with its name and its path; none is passed over. Allowing
less than the schema is fair where the answer loses nothing by it: properties come in the order in which
the schema has them, and others only where `additionalProperties` asks for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

import msgspec

from meshnet.protocol.errors import ApiError, SchemaError
from meshnet.protocol.gbnf import GrammarError, Rules, either, integer, literal, number
from meshnet.protocol.pattern import CHAR, pattern_rule
from meshnet.protocol.schema_formats import FORMATS
from meshnet.protocol.schema_merge import ANNOTATIONS, exclusive, merge
from meshnet.protocol.schema_shape import check_shape, step
from meshnet.protocol.schema_values import TRIED, exact, holds

_WS = '(" " | "\\n" [ \\t]{0,20})?'
_COMMA = f'"," {_WS}'
_COLON = '":" " "?'
_KEY_CHAR = '[^"\\\\\\x00-\\x1F]'
MAX_DEPTH = 64
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SUBSCHEMAS = 4000
_MAX_BRANCHES = 64
_MAX_VALUES = 1000

_OBJECT = frozenset(["properties", "required", "additionalProperties"])
_ARRAY = frozenset(["items", "prefixItems", "minItems", "maxItems"])
_STRING = frozenset(["minLength", "maxLength", "pattern", "format"])
_NUMBER = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_ANY_TYPE = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"])
_HELD = ANNOTATIONS | _OBJECT | _ARRAY | _STRING | _NUMBER | _ANY_TYPE
_NOTHING: dict[str, Any] = {
    "uniqueItems": False,
    "minProperties": 0,
    "minContains": 0,
    "patternProperties": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "propertyNames": True,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}
"""Keywords that are not held, with the value in which they ask for nothing."""


def check_schema(schema: Any, *, param: str) -> None:
    """Raises ApiError (400, `param`), naming keyword and path, unless a grammar can hold the schema."""
    try:
        schema_grammar(schema)
    except SchemaError as error:
        where = f" at '#{error.path}'" if error.path else ""
        raise ApiError(
            400, f"Invalid '{param}': {error}{where}.", code="invalid_schema", param=param
        ) from None


def schema_grammar(schema: Any) -> str:
    """The grammar of one JSON value of this schema. Raises SchemaError."""
    encoded = msgspec.json.encode(schema)
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise SchemaError(f"the schema is larger than {MAX_SCHEMA_BYTES // 1024} KiB", "")
    return _cached_grammar(encoded)


@functools.lru_cache(maxsize=64)
def _cached_grammar(encoded: bytes) -> str:
    rules = Rules()
    root = SchemaRules(rules, msgspec.json.decode(encoded)).root()
    try:
        return rules.text(root)
    except GrammarError as error:
        raise SchemaError(str(error), "") from None


def any_object(rules: Rules) -> str:
    """The rule of any JSON object."""
    return SchemaRules(rules, True).any_value("object")


class SchemaRules:
    """Adds the rules of one schema to a grammar."""

    def __init__(self, rules: Rules, schema: Any) -> None:
        self._rules = rules
        self._schema = schema
        self._refs: dict[str, str] = {}
        self._any: dict[str, str] = {}
        self._budget = MAX_SUBSCHEMAS

    def root(self) -> str:
        """The expression of the schema's values. Raises SchemaError."""
        try:
            check_shape(self._schema)
            return self._value(self._schema, "", frozenset())
        except RecursionError:
            raise SchemaError("the schema is nested too deeply", "") from None

    def part(self, schema: Any) -> str:
        """The expression of a schema that stands within the root, and may refer to it. Raises SchemaError."""
        check_shape(schema)
        return self._value(schema, "", frozenset())

    # ---------------------------------------------------------------- dispatch

    def _value(self, schema: Any, path: str, open_refs: frozenset[str]) -> str:
        """`open_refs`: references followed since the last character, which must not come again."""
        self._budget -= 1
        if self._budget < 0:
            raise SchemaError(f"the schema has more than {MAX_SUBSCHEMAS} parts", path)
        if path.count("/") > 2 * MAX_DEPTH:
            raise SchemaError("the schema is nested too deeply", path)
        if schema is True:
            return self.any_value("value")
        if schema is False:
            raise SchemaError("nothing validates against false", path)
        if "const" in schema or "enum" in schema:
            _refuse_beside_constants(schema, path)
            return self._constants(schema, path)
        _refuse_unknown(schema, path)
        if "$ref" in schema:
            return self._reference(schema, path, open_refs)
        if "allOf" in schema:
            return self._value(self._all_of(schema, path), path, open_refs)
        for keyword in ("oneOf", "anyOf"):
            if keyword in schema:
                return self._one_of(schema, keyword, path, open_refs)
        return self._typed(schema, path)

    def _typed(self, schema: dict[str, Any], path: str) -> str:
        types = schema.get("type") or _mentioned(schema)
        types = [types] if isinstance(types, str) else list(types)
        if not types:
            return self.any_value("value")
        if "number" in types and "integer" in types:
            types.remove("integer")
        try:
            return either([self._of_type(kind, schema, path) for kind in types])
        except GrammarError as error:
            raise SchemaError(str(error), path) from None

    def _of_type(self, kind: str, schema: dict[str, Any], path: str) -> str:
        if kind == "object":
            return self._object(schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "string":
            return self._string(schema, path)
        if kind in ("number", "integer"):
            return self._number(kind, schema)
        return self.any_value(kind)

    def any_value(self, kind: str) -> str:
        """The rule of any value, or of any value of one type."""
        if kind in self._any:
            return self._any[kind]
        rules = self._rules
        if kind == "value":
            name = self._any[kind] = rules.reserve("value")
            kinds = ("object", "array", "string", "number", "boolean", "null")
            rules.define(name, " | ".join(self.any_value(k) for k in kinds))
            return name
        if kind == "object":
            member = f"{self.any_value('string')} {_COLON} {self.any_value('value')}"
            body = f'"{{" {_WS} ({member} ({_COMMA} {member})* {_WS})? "}}"'
        elif kind == "array":
            item = self.any_value("value")
            body = f'"[" {_WS} ({item} ({_COMMA} {item})* {_WS})? "]"'
        elif kind == "string":
            body = f'"\\"" {rules.name(CHAR, "char")}* "\\""'
        elif kind == "boolean":
            body = '"true" | "false"'
        elif kind == "null":
            body = '"null"'
        else:
            body = number(None, None)
        self._any[kind] = rules.name(body, kind)
        return self._any[kind]

    # ---------------------------------------------------------------- values and combinations

    def _constants(self, schema: dict[str, Any], path: str) -> str:
        """Those of the values that hold the keywords beside them too."""
        main = "const" if "const" in schema else "enum"
        values = [schema["const"]] if main == "const" else schema["enum"]
        if len(values) > _MAX_VALUES:
            raise SchemaError(f"enum has more than {_MAX_VALUES} values", path, main)
        beside = [(key, asked) for key, asked in schema.items() if key in TRIED and key != main]
        try:
            valid = [value for value in values if all(holds(value, key, asked) for key, asked in beside)]
        except (ValueError, TypeError) as error:
            raise SchemaError(str(error), path, main) from None
        if not valid:
            raise SchemaError(f"no value of {main} validates against the rest of the schema", path, main)
        texts = [literal(_json(value)) for value in valid]
        return texts[0] if len(texts) == 1 else self._rules.name(" | ".join(dict.fromkeys(texts)), "enum")

    def _reference(self, schema: dict[str, Any], path: str, open_refs: frozenset[str]) -> str:
        pointer = schema["$ref"]
        if pointer in open_refs:
            raise SchemaError(f"'{pointer}' refers to itself without end", path, "$ref")
        target = self._target(pointer, path)
        if any(key not in ANNOTATIONS and key != "$ref" for key in schema):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            joined = merge(rest, target, path, "$ref")
            return self._value(joined, path, open_refs | {pointer})
        if pointer not in self._refs:
            name = self._refs[pointer] = self._rules.reserve("ref")
            body = self._value(target, pointer.removeprefix("#"), open_refs | {pointer})
            self._rules.define(name, body)
        elif open_refs:
            self._check_loops(target, path, open_refs | {pointer})
        return self._refs[pointer]

    def _check_loops(self, schema: Any, path: str, open_refs: frozenset[str]) -> None:
        """A known rule is used again before any character: it must not lead back to where it is used."""
        if not isinstance(schema, dict):
            return
        parts = [p for key in ("anyOf", "oneOf", "allOf") for p in schema.get(key, ())]
        if "$ref" in schema:
            if schema["$ref"] in open_refs:
                raise SchemaError(f"'{schema['$ref']}' refers to itself without end", path, "$ref")
            self._check_loops(self._target(schema["$ref"], path), path, open_refs | {schema["$ref"]})
        for part in parts:
            self._check_loops(part, path, open_refs)

    def _target(self, pointer: str, path: str) -> Any:
        if pointer != "#" and not pointer.startswith("#/"):
            raise SchemaError(
                f"only references within the schema can be followed, not '{pointer}'", path, "$ref"
            )
        value = self._schema
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (LookupError, ValueError, TypeError):
                raise SchemaError(f"'{pointer}' refers to nothing", path, "$ref") from None
        if not isinstance(value, (dict, bool)):
            raise SchemaError(f"'{pointer}' refers to no schema", path, "$ref")
        return value

    def _all_of(self, schema: dict[str, Any], path: str) -> Any:
        joined: Any = {key: value for key, value in schema.items() if key != "allOf"}
        for index, part in enumerate(schema["allOf"]):
            part = self._followed(part, f"{path}/allOf/{index}")
            joined = merge(joined, part, f"{path}/allOf/{index}", "allOf")
        return joined

    def _one_of(self, schema: dict[str, Any], keyword: str, path: str, open_refs: frozenset[str]) -> str:
        rest = {k: v for k, v in schema.items() if k != keyword}
        alone = all(key in ANNOTATIONS for key in rest)
        parts = schema[keyword]
        if len(parts) > _MAX_BRANCHES:
            raise SchemaError(f"{keyword} has more than {_MAX_BRANCHES} schemas", path, keyword)
        if keyword == "oneOf":
            followed = [self._followed(part, f"{path}/oneOf/{i}") for i, part in enumerate(parts)]
            followed = [merge(rest, part, path, "oneOf") for part in followed] if not alone else followed
            for i, part in enumerate(followed):
                for other in followed[:i]:
                    if not exclusive(part, other):
                        raise SchemaError(
                            "oneOf can be held only where the types of its schemas differ, or a required "
                            "property's constants; use anyOf",
                            path,
                            "oneOf",
                        )
        options = []
        for index, part in enumerate(parts):
            at = f"{path}/{keyword}/{index}"
            if part is False:
                continue
            if not alone:
                part = merge(rest, self._followed(part, at), at, keyword)
            options.append(self._value(part, at, open_refs))
        if not options:
            raise SchemaError(f"no schema of {keyword} can be met", path, keyword)
        return options[0] if len(options) == 1 else self._rules.name(" | ".join(options), "any")

    def _followed(self, schema: Any, path: str) -> Any:
        """The schema itself where it is only a reference."""
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema:
            pointer = schema["$ref"]
            if pointer in seen:
                raise SchemaError(f"'{pointer}' refers to itself without end", path, "$ref")
            seen.add(pointer)
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = merge(rest, self._target(pointer, path), path, "$ref")
        return schema

    # ---------------------------------------------------------------- types

    def _object(self, schema: dict[str, Any], path: str) -> str:
        properties: dict[str, Any] = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        extra = schema.get("additionalProperties")
        for name in required:
            if name not in properties:
                if extra is False:
                    raise SchemaError(f"'{name}' is required and not allowed", path, "required")
                properties[name] = True if extra is None else extra
        if extra is None and not schema.keys() & _OBJECT:
            extra = True
        properties = {n: s for n, s in properties.items() if s is not False or n in required}
        rules = self._rules
        members = []
        for name, part in properties.items():
            value = self._value(part, f"{path}/properties/{step(name)}", frozenset())
            key = literal(_json(name))
            members.append((rules.name(f"{key} {_COLON} {value}", "member"), name in required))
        other = ""
        if extra not in (None, False):
            value = self._value(extra, f"{path}/additionalProperties", frozenset())
            other = rules.name(f'"\\"" {self._other_keys(properties)} "\\"" {_COLON} {value}', "member")
        more = f"({_COMMA} {other})*" if other else ""
        # From the last property to the first: what follows once a member stands, and before one does.
        later, first = more, f"({other} {more})?" if other else ""
        for member, needed in reversed(members):
            followed = f"{member} {later}".strip()
            if needed:
                first, later = followed, f"{_COMMA} {followed}"
            else:
                first = f"({followed} | {first})" if first else f"({followed})?"
                later = f"({_COMMA} {member})? {later}".strip()
            first, later = rules.name(first, "first"), rules.name(later, "later")
        body = f"{first} {_WS} " if first else ""
        return rules.name(f'"{{" {_WS} {body}"}}"', "object")

    def _other_keys(self, names: Iterable[str]) -> str:
        """Text of a key that is none of the names; unescaped, so that no name comes in another spelling."""
        tree: dict[str, Any] = {}
        for name in names:
            node = tree
            for char in name:
                node = node.setdefault(char, {})
            node[""] = {}
        if not tree:
            return f"{_KEY_CHAR}*"
        return self._not_in(tree)

    def _not_in(self, tree: dict[str, Any]) -> str:
        branches = {char: node for char, node in tree.items() if char}
        taken = "".join(f"\\U{ord(char):08X}" for char in branches)
        options = [f"{_KEY_CHAR[:-1]}{taken}] {_KEY_CHAR}*"]
        options += [
            f"{literal(char)} {self._not_in(node)}"
            for char, node in branches.items()
            if char not in '"\\' and ord(char) > 31
        ]
        if "" not in tree:
            options.append('""')
        return self._rules.name(" | ".join(options), "key")

    def _array(self, schema: dict[str, Any], path: str) -> str:
        rules = self._rules
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < least:
            raise SchemaError(f"minItems ({least}) is above maxItems ({most})", path, "minItems")
        shown = first if most is None else first[:most]
        parts = [self._value(part, f"{path}/prefixItems/{i}", frozenset()) for i, part in enumerate(shown)]
        low = max(0, least - len(parts))
        high = None if most is None else most - len(parts)
        if first and "items" not in schema:
            high = low
        if items is False:
            if low:
                raise SchemaError(f"minItems is {least}, and items allows no more", path, "items")
            high = 0
        if high != 0:
            item = rules.name(self._value(items, f"{path}/items", frozenset()), "item")
            following = rules.name(f"{_COMMA} {item}", "next")
            if not parts:
                again = rules.repeat(following, max(0, low - 1), None if high is None else high - 1)
                body = f"{item} {again} {_WS}".replace("  ", " ")
                return rules.name(f'"[" {_WS} {body if low else f"({body})?"} "]"', "array")
            parts.append(rules.repeat(following, low, high))
        inner = f" {_COMMA} ".join(parts[: len(shown)])
        if len(parts) > len(shown):
            inner += f" {parts[-1]}"
        return rules.name(f'"[" {_WS} {inner} {_WS} "]"' if inner else '"[" "]"', "array")

    def _string(self, schema: dict[str, Any], path: str) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most is not None and most < least:
            raise SchemaError(f"minLength ({least}) is above maxLength ({most})", path, "minLength")
        pattern = schema.get("pattern")
        if "format" in schema:
            form = FORMATS.get(schema["format"])
            if form is None:
                known = ", ".join(FORMATS)
                raise SchemaError(
                    f"format '{schema['format']}' cannot be held (only {known})", path, "format"
                )
            if pattern is not None:
                raise SchemaError("pattern together with format cannot be held", path, "pattern")
            pattern = form
        if pattern is not None:
            try:
                text = pattern_rule(self._rules, pattern, least, float("inf") if most is None else most)
            except GrammarError as error:
                raise SchemaError(str(error), path, "pattern") from None
        else:
            text = self._rules.repeat(self._rules.name(CHAR, "char"), least, most)
        return self._rules.name(f'"\\"" {text} "\\""', "string")

    def _number(self, kind: str, schema: dict[str, Any]) -> str:
        low, above = _bound(schema.get("minimum"), schema.get("exclusiveMinimum"), max)
        high, below = _bound(schema.get("maximum"), schema.get("exclusiveMaximum"), min)
        if kind == "number":
            return self._rules.name(number(low, high, above=above, below=below), "number")
        least = None if low is None else int(low // 1 + 1) if above else -int(-low // 1)
        most = None if high is None else -int(-high // 1 + 1) if below else int(high // 1)
        return self._rules.name(integer(least, most), "integer")


# ---------------------------------------------------------------- helpers


def _refuse_beside_constants(schema: dict[str, Any], path: str) -> None:
    """Only what the values can be tried against at once."""
    for keyword in schema:
        if keyword in ANNOTATIONS or keyword in TRIED or keyword.startswith("x-"):
            continue
        raise SchemaError(f"constants with '{keyword}' beside them cannot be held", path, keyword)


def _refuse_unknown(schema: dict[str, Any], path: str) -> None:
    for keyword, value in schema.items():
        if keyword in _HELD or keyword.startswith("x-"):
            continue
        if keyword in _NOTHING and value == _NOTHING[keyword]:
            continue
        raise SchemaError(f"the keyword '{keyword}' cannot be held by a grammar", path, keyword)
    if path and "$id" in schema:
        raise SchemaError("'$id' below the root changes what references mean and cannot be held", path, "$id")


def _mentioned(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema without `type` says something about."""
    kinds = (("object", _OBJECT), ("array", _ARRAY), ("string", _STRING), ("number", _NUMBER))
    return [kind for kind, keywords in kinds if schema.keys() & keywords]


def _bound(inclusive: Any, exclusive: Any, tighter: Any) -> tuple[Fraction | None, bool]:
    """The tighter of two bounds and whether it is itself out."""
    if inclusive is None and exclusive is None:
        return None, False
    if inclusive is None:
        return exact(exclusive), True
    if exclusive is None or (tighter(inclusive, exclusive) == inclusive and inclusive != exclusive):
        return exact(inclusive), False
    return exact(exclusive), True


def _json(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if not isinstance(value, (dict, list)) else msgspec.json.format(text, indent=0)
