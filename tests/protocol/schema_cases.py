"""Schemas for the tests: held ones with instances, refused ones with their keyword, and random ones."""

from __future__ import annotations

import random
from typing import Any

NODE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SHAPES: dict[str, Any] = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "dot"}}, "required": ["kind"]},
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["disc", "ball"]},
                "r": {"type": "number", "exclusiveMinimum": 0},
            },
            "required": ["kind", "r"],
        },
    ],
    "discriminator": {"propertyName": "kind"},
}
ALL_OF: dict[str, Any] = {
    "allOf": [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]},
        {"properties": {"a": {"maximum": 5}, "b": {"type": "string"}}, "additionalProperties": False},
    ]
}
SIBLINGS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}
UNCOMMON: dict[str, Any] = {"enum": ["aa", "abc", 4, 5], "maxLength": 2, "multipleOf": 2}

HELD: list[tuple[Any, list[str], list[str]]] = [
    # (schema, texts that its grammar must let through, texts that it must not)
    (True, ["1", "null", '{"a": [true, "x"]}', "[]", "-0.5e10"], ["", "tru", "01", '"a', "[1,]"]),
    ({"type": "object"}, ["{}", '{"a": 1}'], ["[]", "{a: 1}"]),
    ({"type": ["string", "null"]}, ['"x"', "null", '"\\u00e9é"'], ["1", '"\n"', '"\\ud800"']),
    ({"type": "boolean"}, ["true", "false"], ["null"]),
    ({"type": "integer"}, ["0", "-12", "999999999999999"], ["1.5", "01", "-"]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 120}, ["-3", "0", "119"], ["-4", "120", "1e2"]),
    ({"type": "integer", "minimum": 7}, ["7", "10", "123456789"], ["6", "-7"]),
    ({"type": "integer", "maximum": -95}, ["-95", "-1000"], ["-94", "0"]),
    ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3"]),
    ({"type": "number"}, ["0", "-1.25", "3e-7"], [".5", "1.", "+1"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.25", "1", "1.0"], ["1.01", "-0.5", "2"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "0.0", "1"]),
    ({"type": "number", "minimum": -2.75, "maximum": -0.5}, ["-2.75", "-1", "-0.5"], ["-2.8", "-0.4", "0"]),
    ({"type": "number", "minimum": 0.1, "maximum": 0.3}, ["0.1", "0.15", "0.3"], ["0.09", "0.31"]),
    ({"type": "number", "minimum": 5_000_000_000}, ["5000000000", "6000000001"], ["4999999999"]),
    ({"minimum": 3}, ["3", "3.5"], ["2"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abé"', '"\\n\\""'], ['"a"', '"abcd"']),
    ({"type": "string", "maxLength": 300}, ['""', f'"{"x" * 300}"'], [f'"{"x" * 301}"']),
    ({"type": "string", "minLength": 150}, [f'"{"x" * 150}"'], [f'"{"x" * 149}"']),
    ({"type": "string", "pattern": "^[a-c]+-\\d{2}$"}, ['"ab-01"'], ['"d-01"', '"a-1"', '"a-012"']),
    ({"type": "string", "pattern": "cat"}, ['"cat"', '"a cat!"'], ['"ct"', '""']),
    ({"type": "string", "pattern": '^"\\\\?$'}, ['"\\""', '"\\"\\\\"'], ['"\\\\"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"type": "string", "format": "date-time"}, ['"2024-01-31T23:59:59.5Z"'], ['"2024-01-31"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({"enum": [1, "x", None, {"a": [1, 2]}]}, ["1", '"x"', "null", '{"a": [1, 2]}'], ["2", '"y"']),
    ({"type": "string", "enum": ["x", 1]}, ['"x"'], ["1"]),
    (UNCOMMON, ['"aa"', "4"], ['"abc"', "5"]),
    ({"const": 'say "hi"\n'}, ['"say \\"hi\\"\\n"'], ['"say"']),
    (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        ["[]", "[1, 2]"],
        ["[1, 2, 3]", '["a"]'],
    ),
    ({"type": "array", "items": {"enum": [0]}, "minItems": 1}, ["[0]", "[0, 0, 0]"], ["[]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        ['[1, "a"]'],
        ['[1, "a", 2]', '["a", 1]'],
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "maxItems": 3},
        ["[1, 2]", "[1, 2, 2]"],
        ["[1]", "[1, 2, 2, 2]", "[2, 2]"],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}},
            "required": ["b"],
        },
        ['{"b": "x"}', '{"a": 1, "b": "x", "c": null}', '{"b": "", "c": null}', '{\n  "b": "x"\n}'],
        ["{}", '{"a": 1}', '{"b": 1}', '{"b": "x", "b": "y"}', '{"b": "x", "d": 1}'],
    ),
    (
        {"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"ab": null}', '{"ab": null, "abc": 1, "a": 2}', '{"x": 1}'],
        ['{"ab": 1}', '{"x": null}', '{"\\u0061b": 1}'],
    ),
    ({"required": ["a"]}, ['{"a": [1]}'], ["{}"]),
    ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ['{"a": 1}']),
    (NODE, ['{"value": 1, "next": {"value": 2, "next": null}}'], ['{"value": 1}', "null"]),
    (
        SHAPES,
        ['{"kind": "dot"}', '{"kind": "ball", "r": 0.5}'],
        ['{"kind": "ball"}', '{"kind": "disc", "r": 0}'],
    ),
    (ALL_OF, ['{"a": 5}', '{"a": 0, "b": "x"}'], ['{"a": 6}', '{"b": "x"}']),
    (SIBLINGS, ['{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'], ["{}"]),
    ({"anyOf": [{"type": "string"}, False, {"const": 5}]}, ['"a"', "5"], ["6"]),
    (
        {"properties": {"a": {"$ref": "#/$defs/~0x~1y"}}, "required": ["a"], "$defs": {"~x/y": {"const": 1}}},
        ['{"a": 1}'],
        ['{"a": 2}'],
    ),
]

REFUSED: list[tuple[Any, str, str]] = [
    # (schema, keyword named in the message, path)
    ({"not": {"type": "null"}}, "not", ""),
    ({"properties": {"a": {"if": True, "then": False}}}, "if", "/properties/a"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", ""),
    ({"type": "array", "contains": {"const": 1}}, "contains", ""),
    ({"items": {"type": "integer", "multipleOf": 3}}, "multipleOf", "/items"),
    ({"type": "object", "minProperties": 1}, "minProperties", ""),
    ({"type": "object", "maxProperties": 1}, "maxProperties", ""),
    ({"patternProperties": {"^a": True}}, "patternProperties", ""),
    ({"propertyNames": {"maxLength": 3}}, "propertyNames", ""),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", ""),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", ""),
    ({"unevaluatedProperties": False}, "unevaluatedProperties", ""),
    ({"$dynamicRef": "#x"}, "$dynamicRef", ""),
    ({"$ref": "https://example.org/schema"}, "https://example.org/schema", ""),
    ({"$ref": "#/$defs/none"}, "refers to nothing", ""),
    ({"$ref": "#"}, "without end", ""),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "without end", "/anyOf/0"),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "oneOf", ""),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf", ""),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern", "/allOf/1"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "allOf", "/allOf/1"),
    ({"type": "string", "format": "uri"}, "uri", ""),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern", ""),
    ({"type": "string", "pattern": "a\\b"}, "pattern", ""),
    ({"type": "string", "pattern": "(a)\\1"}, "pattern", ""),
    ({"type": "string", "pattern": "(a*)*"}, "pattern", ""),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, "minLength", ""),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength", ""),
    ({"type": "string", "maxLength": 10_000_000}, "10000000", ""),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems", ""),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer", ""),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "no number", ""),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required", ""),
    ({"enum": [1, 2], "type": "string"}, "enum", ""),
    ({"type": "flower"}, "flower", "/type"),
    ({"requierd": ["a"]}, "requierd", ""),
    ({"properties": {"a": {"nullable": True}}}, "nullable", "/properties/a"),
    ({"items": [{"type": "integer"}]}, "items", "/items"),
    (False, "false", ""),
    ({"properties": {"a": 5}}, "a schema is an object or a boolean, not 5", "/properties/a"),
    ({"required": "a"}, "'required' must be a list of names", "/required"),
    ({"minLength": True}, "'minLength' must be a whole number", "/minLength"),
    ({"maximum": "3"}, "'maximum' must be a finite number", "/maximum"),
    ({"anyOf": []}, "'anyOf' must be a list of schemas", "/anyOf"),
    ({"$ref": 5}, "'$ref' must be a string", "/$ref"),
    ({"type": ["null", "null"]}, "'type' must be one of", "/type"),
    ({"pattern": "["}, "pattern", ""),
    ({"enum": [1], "minimum": "x"}, "'minimum'", "/minimum"),
    ({"enum": [4], "multipleOf": "yes"}, "'multipleOf' cannot be 'yes'", ""),
    ({"enum": ["x"], "format": "uri"}, "'format' cannot be 'uri'", ""),
    ({"enum": ["a" * 40 + "!"], "pattern": "^(a+)+$"}, "pattern", ""),
    ({"const": {"a": 1}, "properties": {"a": {"type": "null"}}}, "properties", ""),
]


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema of the keywords that are held, and now and then of one that is not."""
    kinds = ["integer", "number", "string", "null", "boolean", "enum", "any"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "anyOf", "oneOf", "allOf"]
    kind = rng.choice(kinds)
    make = {
        "integer": _number,
        "number": _number,
        "string": _string,
        "object": _object,
        "array": _array,
        "enum": _enum,
    }.get(kind)
    if make is not None:
        schema = make(rng, kind, depth)
    elif kind in ("anyOf", "oneOf", "allOf"):
        schema = {kind: [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        if rng.random() < 0.3:
            schema |= (
                random_schema(rng, 0) if rng.random() < 0.5 else {"type": ["object", "integer", "string"]}
            )
    else:
        schema = {} if kind == "any" else {"type": kind}
    if rng.random() < 0.1:
        schema["description"] = "text"
    if rng.random() < 0.02:
        schema[rng.choice(("uniqueItems", "not", "minProperties"))] = rng.choice((True, {}, 1))
    if rng.random() < 0.1 and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if rng.random() < 0.05:
        schema.pop("type", None)
    return schema


def _number(rng: random.Random, kind: str, _depth: int) -> dict[str, Any]:
    def bound() -> float:
        scale = rng.choice((1, 10, 1000, 10**6, 10**10))
        value = rng.uniform(-scale, scale)
        return int(value) if kind == "integer" or rng.random() < 0.5 else round(value, rng.randint(0, 8))

    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return {"type": kind, **{keyword: bound() for keyword in keywords if rng.random() < 0.25}}


_PATTERNS = (
    *("^a+$", "b", "^x", "y$", "^[A-Z][a-z]{1,3}$", "^(red|green|blue)$", "^\\d{3}-\\d{4}$", "^[^a-z]*$"),
    *(
        "^\\w+@\\w+\\.com$",
        "^(?:ab?){2,3}c*$",
        "^.{2,5}$",
        "^$|^-$",
        "\\s",
        "^[\\w\\-. ]+$",
        '^\\u00e9["\\\\\\n]?$',
    ),
    *("^[^\\s]+$", "^[\\W]\\D\\S$", "^a{0,70}b{65}$", "^\\x41\\t?$", "(?i)a", "[", "a**", "^a|b$"),
)


def _string(rng: random.Random, _kind: str, _depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    roll = rng.random()
    if roll < 0.3:
        schema["pattern"] = rng.choice(_PATTERNS)
    elif roll < 0.5:
        schema["format"] = rng.choice(("date", "time", "date-time", "uuid", "ipv4", "email", "duration"))
    if roll >= 0.5 or rng.random() < 0.1:
        if rng.random() < 0.4:
            schema["minLength"] = rng.choice((0, 1, 3, 70))
        if rng.random() < 0.4:
            schema["maxLength"] = rng.choice((0, 1, 5, 90, 200))
    return schema


_NAMES = ("a", "b", "ab", "abc", "é", 'q"', "b\\c", "", "x y", "a/b", "~")


def _object(rng: random.Random, _kind: str, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object"}
    if names or rng.random() < 0.5:
        schema["properties"] = {name: random_schema(rng, depth - 1) for name in names}
    if rng.random() < 0.7:
        schema["required"] = [name for name in names if rng.random() < 0.5]
    if rng.random() < 0.15:
        schema.setdefault("required", []).append("other")
    if rng.random() < 0.5:
        schema["additionalProperties"] = rng.choice((False, True, random_schema(rng, depth - 1)))
    return schema


def _array(rng: random.Random, _kind: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth - 1)
    if rng.random() < 0.2:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.4:
        schema["maxItems"] = rng.randint(0, 5)
    return schema


def _enum(rng: random.Random, _kind: str, _depth: int) -> dict[str, Any]:
    values = [1, 1.5, True, None, "x", 'a "quote"', "é\n", [1, [2]], {"k": "v", "l": {}}, -7, ""]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}
