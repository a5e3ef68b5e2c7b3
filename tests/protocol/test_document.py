"""The published schemas say what the parser takes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from protocol.test_openai import CHAT_REFUSALS, TOOL, UNSUPPORTED, USER

from meshnet.protocol.document import body_schemas

SCHEMAS = body_schemas()


def takes(name: str, body: dict[str, Any]) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    jsonschema.Draft202012Validator.check_schema(schema)
    return bool(jsonschema.Draft202012Validator(schema).is_valid(body))


def chat(**more: Any) -> bool:
    return takes("ChatBody", {"model": "m", "messages": [USER], **more})


def test_good_bodies() -> None:
    assert chat(temperature=1, tools=[TOOL], stream=True, stop=["a"], response_format={"type": "text"})
    assert chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert takes("CompletionBody", {"model": "m", "prompt": [1, 2], "echo": False})


@pytest.mark.parametrize("parameters", [{"foo": 1}, {"n": 9}, {"temperature": "x"}, {"stop": [""] * 5}])
def test_bad_bodies(parameters: dict[str, Any]) -> None:
    assert not chat(**parameters)
    assert any(parameters.keys() == refused.keys() for refused, _, _ in CHAT_REFUSALS)


def test_what_is_always_refused_is_not_published() -> None:
    text = json.dumps(SCHEMAS)
    assert "image_url" not in text
    assert "input_audio" not in text
    for name, neutral, asking in UNSUPPORTED:
        assert all(chat(**{name: value}) for value in (None, *neutral))
        assert not any(chat(**{name: value}) for value in asking if value != 0 or value is True)
