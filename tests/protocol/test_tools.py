"""Tool calls in text: every format, every cut, no markup in what comes out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.protocol.toolparser import ArgumentsDelta, CallDelta, Delta, TextDelta, ToolParser
from meshnet.protocol.tools import (
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    TAGGED,
    ToolFormat,
    detect_tool_format,
)

NAMES = ("get_weather", "add")
FUNCTIONS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "add": None,
}


@dataclass
class Outcome:
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """(id, name, arguments)"""

    @property
    def plain(self) -> list[tuple[str, object]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def collect(deltas: Iterable[Delta]) -> Outcome:
    out = Outcome()
    for delta in deltas:
        if isinstance(delta, TextDelta):
            assert delta.text
            out.text += delta.text
        elif isinstance(delta, CallDelta):
            assert delta.index == len(out.calls)
            out.calls.append((delta.id, delta.name, ""))
        else:
            assert delta.index == len(out.calls) - 1
            call = out.calls[-1]
            out.calls[-1] = (call[0], call[1], call[2] + delta.text)
    return out


def parse(form: ToolFormat, pieces: Iterable[str], *, or_json: bool = False) -> Outcome:
    parser = ToolParser(form, FUNCTIONS, "call-1/0", or_json=or_json)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return collect([*deltas, *parser.finish()])


WEATHER = '{"city": "Zürich \\"}{ </tool_call> [TOOL_CALLS]", "days": [1, {"x": {}}]}'
ADD = '{"a": 1, "b": -2.5}'
SAMPLES: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "hermes": (
        HERMES,
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>',
        "Let me see.",
        [("get_weather", WEATHER), ("add", ADD)],
    ),
    "hermes, no call": (HERMES, "1 < 2 <tool> <tool_cal\n", "1 < 2 <tool> <tool_cal\n", []),
    "hermes, text after": (
        HERMES,
        f'<tool_call>{{"name":"add","arguments":{ADD}}}</tool_call>\n\n Done. ',
        "Done. ",
        [("add", ADD)],
    ),
    "hermes, other order of keys": (
        HERMES,
        f'<tool_call>\n{{"arguments": {ADD}, "name": "add"}}\n</tool_call>',
        "",
        [("add", json.dumps(json.loads(ADD), separators=(",", ":")))],
    ),
    "hermes, more keys": (
        HERMES,
        f'<tool_call>\n{{"name": "add", "arguments": {ADD}, "id": "}}"}}\n</tool_call>',
        "",
        [("add", ADD)],
    ),
    "hermes, no closer": (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {ADD}}}',
        "",
        [("add", ADD)],
    ),
    "hermes, cut closer": (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {ADD}}}\n</tool_c',
        "",
        [("add", ADD)],
    ),
    "hermes, no JSON": (HERMES, "So <tool_call>\nsorry\n</tool_call> no", "So \nsorry\n no", []),
    "llama": (LLAMA, f'{{"name": "add", "parameters": {ADD}}}', "", [("add", ADD)]),
    "llama, tag": (
        LLAMA,
        f'<|python_tag|>{{"name": "add", "parameters": {ADD}}}; '
        f'{{"name": "get_weather", "parameters": {WEATHER}}}',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    "llama, JSON answer": (
        LLAMA,
        ' {"name": "Bob", "parameters": {}}',
        ' {"name": "Bob", "parameters": {}}',
        [],
    ),
    "llama, text": (LLAMA, "The name is <|python", "The name is <|python", []),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, '
        f'{{"name": "get_weather", "arguments": {WEATHER}}}]',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    "mistral, bare object": (
        MISTRAL,
        f'ok[TOOL_CALLS]{{"name": "add", "arguments": {ADD}}}',
        "ok",
        [("add", ADD)],
    ),
    "mistral args": (
        MISTRAL_ARGS,
        f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{WEATHER}",
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    "tags": (
        TAGGED,
        "Well.\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nZürich\n\n 5 < 6 </param>\n</parameter>\n"
        '<parameter=days>\n[1, {"x": 2}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "Well.",
        [("get_weather", '{"city": "Zürich\\n\\n 5 < 6 </param>", "days": [1,{"x":2}]}'), ("add", "{}")],
    ),
    "tags, untidy": (
        TAGGED,
        "<tool_call><function=add>\nsum:<parameter=a>1</parameter> and <parameter=b>two</parameter>, then"
        "</function></tool_call>",
        "",
        [("add", '{"a": "1", "b": "two"}')],
    ),
    "tags, cut": (
        TAGGED,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</para",
        "",
        [("add", '{"a": "1"')],
    ),
    "tags, JSON in them": (
        TAGGED,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("add", '{"a":1}')],
    ),
    "generic": (
        GENERIC,
        f'\n{{"name": "add", "arguments": {ADD}}}\n{{"name": "get_weather", "parameters": {WEATHER}}}',
        "",
        [("add", ADD), ("get_weather", WEATHER)],
    ),
    "generic, text": (GENERIC, "Hello {there} ", "Hello {there} ", []),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_at_every_cut(name: str) -> None:
    form, text, shown, calls = SAMPLES[name]
    whole = parse(form, [text])
    assert whole.text == shown
    assert [(n, a) for _, n, a in whole.calls] == calls
    assert parse(form, list(text)) == whole
    for cut in range(len(text) + 1):
        assert parse(form, [text[:cut], text[cut:]]) == whole, cut


FORMATS = [HERMES, TAGGED, LLAMA, MISTRAL, MISTRAL_ARGS, GENERIC]
FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<tool",
            "[TOOL",
        ),
        *('{"name": "add", "arguments": ', '{"name": "add", "parameters": ', '{"name":', '"add"', "add"),
        *("<function=add>", "</function>", "<parameter=a>", "<parameter=city>", "</parameter>", "<"),
        *("{}", ADD, WEATHER, "}", "{", "]", "[", ",", ";", '"', "\\", " ", "\n", "text", "ß"),
    ]
)


@settings(max_examples=300)
@given(
    st.lists(FRAGMENTS, max_size=14),
    st.sampled_from(FORMATS),
    st.data(),
)
def test_cuts_change_nothing(parts: list[str], form: ToolFormat, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    or_json = data.draw(st.booleans())
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = parse(form, [text], or_json=or_json)
    assert parse(form, pieces, or_json=or_json) == whole
    assert parse(form, list(text), or_json=or_json) == whole


@given(st.text(st.characters(codec="utf-8", exclude_characters="<[{"), max_size=80))
def test_text_without_calls_is_untouched(text: str) -> None:
    for form in FORMATS:
        assert parse(form, list(text)).text == text


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=12)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES | st.lists(VALUES, max_size=3), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3), st.integers(1, 7))
def test_calls_come_through(calls: list[tuple[str, dict[str, object]]], size: int) -> None:
    objects = {
        key: [json.dumps({"name": name, key: value}, ensure_ascii=False) for name, value in calls]
        for key in ("arguments", "parameters")
    }
    texts = {
        HERMES: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects["arguments"]),
        LLAMA: "; ".join(objects["parameters"]),
        MISTRAL: f"[TOOL_CALLS][{', '.join(objects['arguments'])}]",
        MISTRAL_ARGS: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(value)}" for name, value in calls),
    }
    for form, text in texts.items():
        out = parse(form, [text[i : i + size] for i in range(0, len(text), size)])
        assert out.text == ""
        assert out.plain == calls
        assert len({call for call, _, _ in out.calls}) == len(calls)
        assert all(len(call) == 9 and call.isalnum() for call, _, _ in out.calls) == form.short_ids


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(HERMES, FUNCTIONS, "seed")
    assert parser.push('<tool_call>\n{"name": "add", "arguments": ') == []
    assert [type(delta).__name__ for delta in parser.push('{"a"')] == ["CallDelta", "ArgumentsDelta"]
    assert parser.push(": 1") == [ArgumentsDelta(0, ": 1")]
    assert parser.push(', "b": 2}}') == [ArgumentsDelta(0, ', "b": 2}')]


def test_a_json_answer_keeps_an_opener_in_its_strings() -> None:
    text = '{"html": "<tool_call>{}</tool_call>"}'
    assert parse(HERMES, list(text), or_json=True).text == text
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert parse(HERMES, list(f"{call}\n{call}"), or_json=True).plain == [("add", {}), ("add", {})]


def test_long_garbage_is_read_once() -> None:
    """A model that never closes what it began costs time in proportion to its text, not to its square."""
    parser = ToolParser(HERMES, FUNCTIONS, "seed")
    parser.push('<tool_call>{"nom": "')
    for _ in range(20_000):
        assert parser.push("xyz ") == []
    assert len(collect(parser.finish()).text) == len('{"nom": "') + 80_000


TEMPLATES = {
    "{% if tools %}<tool_call>\n<function=example>\n<parameter=x>{% endif %}": TAGGED,
    "{% if tools %}<tool_call>\n{...}</tool_call>{% endif %}": HERMES,
    "{%- if tools is not none %}<|start_header_id|>ipython{{ tool.parameters }}<|python_tag|>": LLAMA,
    "{% for t in tools %}[AVAILABLE_TOOLS]{% endfor %}[TOOL_CALLS]": MISTRAL,
    "{% for t in tools %}[TOOL_CALLS]{{ name }}[ARGS]{{ args }}{% endfor %}": MISTRAL_ARGS,
    "{% if tools %}{{ tools | tojson }}{% endif %}": GENERIC,
    "{% for m in messages %}{{ m.content }}{% endfor %}": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_formats_are_told_from_the_template(template: str) -> None:
    assert detect_tool_format(template) == TEMPLATES[template]
