"""Grammars for tool calls: what they let end parses into calls whose arguments hold their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from protocol.conftest import Judge
from protocol.gbnf_sampler import Grammar as Sampler
from protocol.test_tools import collect

from meshnet.protocol.errors import ApiError
from meshnet.protocol.grammar import GrammarSpec, grammar_for
from meshnet.protocol.openai import ChatRequest, parse_chat
from meshnet.protocol.toolparser import ToolParser
from meshnet.protocol.tools import (
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    TAGGED,
    ToolFormat,
)

FORMATS = [HERMES, TAGGED, LLAMA, MISTRAL, MISTRAL_ARGS, GENERIC]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOW: dict[str, Any] = {"name": "now"}
ODD: dict[str, Any] = {
    "name": "odd",
    "parameters": {
        "properties": {
            "even": {"type": "integer", "multipleOf": 2},
            "day": {"$ref": "#/$defs/day"},
        },
        "required": ["even", "day"],
        "$defs": {"day": {"enum": ["mon", "tue"]}},
    },
}


def request(*functions: dict[str, Any], **more: Any) -> ChatRequest:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    if functions:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    return parse_chat(json.dumps(body).encode())


def sentences(spec: GrammarSpec, count: int = 60) -> list[str]:
    sampler, rng = Sampler(spec.gbnf), random.Random(7)
    return [sampler.sample(rng) for _ in range(count)]


def read(form: ToolFormat, asked: ChatRequest, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    functions = {tool.name: tool.parameters for tool in asked.tools}
    parser = ToolParser(form, functions, "call-1/0", or_json=asked.response_format != "text")
    deltas = [delta for char in text for delta in parser.push(char)]
    out = collect([*deltas, *parser.finish()])
    return out.text, [(name, json.loads(arguments)) for _, name, arguments in out.calls]


def check_arguments(calls: list[tuple[str, dict[str, Any]]]) -> None:
    for name, arguments in calls:
        if name == "get_weather":
            jsonschema.validate(arguments, WEATHER["parameters"])
        else:
            assert (name, arguments) == ("now", {})


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_required_calls(form: ToolFormat, judge: Judge) -> None:
    asked = request(WEATHER, NOW, tool_choice="required")
    spec = grammar_for(asked, form)
    grammar = judge.load(spec.gbnf)
    seen: set[str] = set()
    for number, text in enumerate(sentences(spec)):
        shown, calls = read(form, asked, text)
        assert shown == ""
        assert calls
        check_arguments(calls)
        seen.update(name for name, _ in calls)
        assert number % 6 or judge.lets_end(grammar, text)
    assert seen == {"get_weather", "now"}
    assert not judge.lets_end(grammar, "")
    assert not judge.lets_end(grammar, "Hello")
    assert spec.show_control
    grammar.close()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_named_function_is_called_once(form: ToolFormat) -> None:
    asked = request(WEATHER, NOW, tool_choice={"type": "function", "function": {"name": "now"}})
    for text in sentences(grammar_for(asked, form), 20):
        assert read(form, asked, text) == ("", [("now", {})])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_strict_function_may_be_left_out_but_not_misused(form: ToolFormat, judge: Judge) -> None:
    strict = {**WEATHER, "strict": True}
    asked = request(strict, NOW)
    spec = grammar_for(asked, form)
    grammar = judge.load(spec.gbnf)
    for text in sentences(spec, 40):
        check_arguments(read(form, asked, text)[1])
    before = "" if form.bare else "Let me see. <\n"
    for call in sentences(grammar_for(request(strict, NOW, tool_choice="required"), form), 12):
        assert judge.lets_end(grammar, before + call)
        assert not judge.lets_end(grammar, before + call + "x")
        assert not judge.lets_end(grammar, before + call.replace("city", "town").replace("now", "then"))
    for text in ("", "Hello world.", "1 < 2 and [x] <tool_call <|python [TOOL", "  spaced "):
        assert judge.lets_end(grammar, text), text
        assert read(form, asked, text) == (text, [])
    grammar.close()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_no_more_than_one_call(form: ToolFormat, judge: Judge) -> None:
    several = sentences(grammar_for(request(WEATHER, NOW, tool_choice="required"), form), 60)
    asked = request(WEATHER, NOW, parallel_tool_calls=False)
    grammar = judge.load(grammar_for(asked, form).gbnf)
    counts = [len(read(form, asked, text)[1]) for text in several]
    assert (max(counts) > 1) == (not form.bare)
    for text, count in list(zip(several, counts, strict=True))[:20]:
        assert judge.lets_end(grammar, text) == (count == 1)
    grammar.close()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_json_or_calls(form: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"html": {"type": "string"}}, "required": ["html"]}
    asked = request(
        WEATHER,
        response_format={"type": "json_schema", "json_schema": {"name": "page", "schema": schema}},
    )
    spec = grammar_for(asked, form)
    kinds = set()
    for text in [*sentences(spec, 120), json.dumps({"html": f"{form.opener} {form.closer}"})]:
        shown, calls = read(form, asked, text)
        kinds.add(bool(calls))
        if calls:
            assert shown == ""
            check_arguments(calls)
        else:
            assert shown == text
            jsonschema.validate(json.loads(text), schema)
    assert kinds == {True, False}


def test_what_a_grammar_cannot_hold_is_loosened_unless_strict() -> None:
    asked = request(ODD, tool_choice="required")
    for text in sentences(grammar_for(asked, HERMES), 40):
        _, calls = read(HERMES, asked, text)
        for _, arguments in calls:
            assert arguments["day"] in ("mon", "tue")
            assert "even" in arguments
    with pytest.raises(ApiError) as caught:
        request({**ODD, "strict": True})
    assert caught.value.param == "tools[0].function.parameters"
    assert "multipleOf" in caught.value.message
    assert "'#/properties/even'" in caught.value.message


TAGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "count": {"type": "integer", "minimum": 0},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
    },
    "required": ["text", "count"],
    "$defs": {"item": {"type": "boolean"}},
}


def test_values_in_tags_hold_their_schemas() -> None:
    asked = request({"name": "f", "strict": True, "parameters": TAGS}, tool_choice="required")
    seen: set[str] = set()
    for text in sentences(grammar_for(asked, TAGGED), 120):
        shown, calls = read(TAGGED, asked, text)
        assert shown == ""
        for _, arguments in calls:
            jsonschema.validate(arguments, TAGS)
            seen.update(arguments)
    assert seen == {"text", "unit", "count", "list"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "minLength": 2}}},
        {"properties": {"a": {"type": ["string", "null"]}}},
        {"properties": {"a>b": {"type": "integer"}}},
        {"properties": {}, "required": ["a"]},
        {"anyOf": [{"required": ["a"]}]},
    ],
)
def test_what_tags_cannot_hold_is_refused_of_strict_functions(parameters: dict[str, Any]) -> None:
    asked = request({"name": "f", "parameters": parameters, "strict": True})
    with pytest.raises(ApiError) as caught:
        grammar_for(asked, TAGGED)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    loose = request({"name": "f", "parameters": parameters}, tool_choice="required")
    for text in sentences(grammar_for(loose, TAGGED), 20):
        assert read(TAGGED, loose, text)[1]


def test_response_formats() -> None:
    assert grammar_for(request(), HERMES) == GrammarSpec()
    assert grammar_for(request(WEATHER), HERMES) == GrammarSpec(show_control=True)
    assert grammar_for(request(WEATHER, tool_choice="none"), HERMES) == GrammarSpec()
    for text in sentences(grammar_for(request(response_format={"type": "json_object"}), None)):
        assert isinstance(json.loads(text), dict)


def test_too_many_functions_are_refused() -> None:
    def wide(number: int) -> dict[str, Any]:
        names = {f"property_{number}_{i}": {"type": "string", "maxLength": i + 1} for i in range(60)}
        return {"name": f"f{number}", "parameters": {"type": "object", "properties": names}, "strict": True}

    asked = request(*(wide(number) for number in range(60)))
    with pytest.raises(ApiError) as caught:
        grammar_for(asked, HERMES)
    assert caught.value.param == "tools"
    assert "256 KiB" in caught.value.message
