"""What a schema's grammar lets end validates; what it cannot hold is refused by name and path."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.conftest import Judge
from protocol.gbnf_sampler import Grammar as Sampler
from protocol.schema_cases import HELD, NODE, REFUSED, random_schema

from meshnet.protocol.errors import ApiError, SchemaError
from meshnet.protocol.schema import check_schema, schema_grammar
from meshnet.protocol.schema_values import TRIED, holds

Check = jsonschema.Draft202012Validator.FORMAT_CHECKER
CHECKED_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6")


def validates(schema: Any, text: str) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=Check)
    return bool(validator.is_valid(json.loads(text)))


@pytest.mark.parametrize("index", range(len(HELD)))
def test_llama_cpp_takes_what_it_should(index: int, judge: Judge) -> None:
    schema, good, bad = HELD[index]
    grammar = judge.load(schema_grammar(schema))
    for text in good:
        assert validates(schema, text), text
        assert judge.lets_end(grammar, text), text
    for text in bad:
        assert not judge.lets_end(grammar, text), text
    grammar.close()


@pytest.mark.parametrize("index", range(len(HELD)))
def test_random_sentences_validate(index: int, judge: Judge) -> None:
    """Written by an independent reading of the grammar's text; llama.cpp takes them all."""
    schema = HELD[index][0]
    gbnf = schema_grammar(schema)
    sampler, rng, grammar = Sampler(gbnf), random.Random(index), judge.load(gbnf)
    for number in range(60):
        text = sampler.sample(rng)
        assert validates(schema, text), text
        assert number % 6 or judge.lets_end(grammar, text), text
    grammar.close()


@settings(max_examples=400)
@given(st.integers(0, 2**40))
def test_random_schemas(seed: int) -> None:
    """Whatever is not refused is held."""
    rng = random.Random(seed)
    schema = random_schema(rng)
    try:
        gbnf = schema_grammar(schema)
    except SchemaError:
        return
    sampler = Sampler(gbnf)
    if sampler.cost["root"] == float("inf"):
        return  # nothing finite: it can only end by length
    for _ in range(8):
        text = sampler.sample(rng, budget=25)
        assert validates(schema, text), (schema, text)


def test_random_schemas_are_mostly_held() -> None:
    """The property above would be empty if everything were refused."""
    held = 0
    for seed in range(300):
        try:
            schema_grammar(random_schema(random.Random(seed)))
            held += 1
        except SchemaError:
            pass
    assert held > 150


@pytest.mark.parametrize("index", [0, 4, 16, 19, 34, 35, 38])
def test_random_tokens_of_llama_cpp_validate(index: int, judge: Judge) -> None:
    """Tokens drawn evenly from all that llama.cpp's sampler allows, with a taste for those that close."""
    schema = HELD[index][0]
    vocabulary = judge.tokenizer
    grammar = judge.load(schema_grammar(schema))
    closers = [int(t) for c in ('"}', "}", '"', "]") for t in vocabulary.encode(c, add_bos=False)]
    everything = np.arange(vocabulary.n_vocab, dtype=np.int32)
    rng = np.random.default_rng(index)
    ended = 0
    for _ in range(12):
        grammar.reset()
        pieces: list[bytes] = []
        for _ in range(60):
            allowed = grammar.allowed(everything)
            free = [t for t in closers if allowed[t]]
            choices = [t for t in np.flatnonzero(allowed) if int(t) not in vocabulary.eog]
            if allowed[vocabulary.eos] and (not choices or rng.random() < 0.5):
                ended += 1
                assert validates(schema, b"".join(pieces).decode())
                break
            token = int(rng.choice(free if free and rng.random() < 0.3 else choices))
            grammar.accept(token)
            pieces.append(vocabulary.piece(token, special=True))
    assert ended
    grammar.close()


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refusals_name_keyword_and_path(index: int) -> None:
    schema, named, path = REFUSED[index]
    with pytest.raises(ApiError) as caught:
        check_schema(schema, param="response_format.json_schema.schema")
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_schema")
    assert error.param == "response_format.json_schema.schema"
    assert named in error.message
    assert (f" at '#{path}'" in error.message) == bool(path)


@pytest.mark.parametrize("form", CHECKED_FORMATS)
def test_formats_are_what_they_say(form: str) -> None:
    sampler = Sampler(schema_grammar({"type": "string", "format": form}))
    rng = random.Random(form)
    for _ in range(200):
        value = json.loads(sampler.sample(rng))
        if form == "date":
            datetime.date.fromisoformat(value)
        elif form == "time":
            datetime.time.fromisoformat(value.replace("Z", "+00:00"))
        elif form == "date-time":
            datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
        elif form == "uuid":
            assert str(uuid.UUID(value)) == value
        else:
            assert ipaddress.ip_address(value).version == int(form[-1])


def test_patterns_match_in_python_and_in_spirit() -> None:
    """The JSON text between the quotes, decoded, is found by the pattern."""
    for pattern in (
        "^[^\\s]+$",
        "[\\W]",
        "^\\S\\D$",
        "^.*$",
        '^["\\\\]{3}$',
        "^[^\\w]$",
        "a|^b|c$",
        "^(a|b|)c$",
    ):
        sampler = Sampler(schema_grammar({"type": "string", "pattern": pattern}))
        rng = random.Random(1)
        for _ in range(100):
            assert re.search(pattern, json.loads(sampler.sample(rng)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text("ab-1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2),
    max_leaves=4,
)
ASKED: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["integer", "number", "string", ["null", "array"], ["object", "integer"]]),
    "const": VALUES,
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "multipleOf": st.sampled_from([1, 2, 0.5, 0.1]),
    "uniqueItems": st.booleans(),
    "required": st.lists(st.text("ab", max_size=1), max_size=2),
}


@given(VALUES, st.data())
def test_values_are_tried_as_jsonschema_tries_them(value: Any, data: st.DataObject) -> None:
    keyword = data.draw(st.sampled_from(sorted(set(TRIED) - {"format"})))
    counted = keyword.endswith(("Length", "Items", "Properties"))
    number = st.integers(0, 3) if counted else st.floats(-3, 3)
    asked = data.draw(ASKED.get(keyword, number))
    ours = holds(value, keyword, asked)
    assert ours == jsonschema.Draft202012Validator({keyword: asked}).is_valid(value)


def test_annotations_and_extensions_change_nothing() -> None:
    noted = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "D",
        "default": 3,
        "examples": [1],
        "x-order": 1,
        "type": "integer",
        "minimum": 0,
    }
    assert schema_grammar(noted) == schema_grammar({"type": "integer", "minimum": 0})


def test_bounds_of_size() -> None:
    with pytest.raises(SchemaError, match="larger than 64 KiB"):
        schema_grammar({"enum": ["x" * 70_000]})
    with pytest.raises(SchemaError, match="more than 1000 values"):
        schema_grammar({"enum": list(range(1001))})
    with pytest.raises(SchemaError, match="more than 64 schemas"):
        schema_grammar({"anyOf": [{"const": number} for number in range(65)]})
    with pytest.raises(SchemaError, match="4000 parts"):
        schema_grammar({"properties": {str(number): True for number in range(4000)}})
    nested: Any = {"type": "integer"}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    with pytest.raises(SchemaError, match="nested too deeply"):
        schema_grammar(nested)
    doubling: dict[str, Any] = {
        "$defs": {
            "a": {
                "type": "object",
                "properties": {
                    "x": {"$ref": "#/$defs/a", "required": ["y"]},
                    "y": {"$ref": "#/$defs/a", "required": ["x"]},
                },
            }
        },
        "$ref": "#/$defs/a",
    }
    with pytest.raises(SchemaError, match="nested too deeply"):
        schema_grammar(doubling)


def test_recursion_is_one_rule() -> None:
    assert schema_grammar(NODE).count("value") == 1
