"""Tool calls end to end: the real model under a chat template that has tools, asked with OpenAI's SDK."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from support.mesh import Demo, run_demo
from support.smollm2 import smollm2_path

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Forecast", "parameters": PARAMETERS, "strict": True},
}
NOW: ChatCompletionToolUnionParam = {"type": "function", "function": {"name": "now"}}
ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What will the weather be in Oslo for 3 days?"}
]


@pytest.fixture(scope="module")
def demo_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("tools")
    plain = smollm2_path()
    made = folder / "smollm2-tools.gguf"
    subprocess.run(
        [
            *(sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"),
            *("--chat-template", TEMPLATE, str(plain), str(made)),
        ],
        check=True,
        capture_output=True,
    )
    with run_demo(folder, "--model", str(made)) as running:
        yield running


@pytest.fixture
def client(demo_with_tools: Demo) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=demo_with_tools.base_url, api_key=demo_with_tools.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def test_the_model_says_that_it_has_tools(demo_with_tools: Demo) -> None:
    assert [listed["tools"] for listed in demo_with_tools.get("/api/models")["models"]] == [True]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_required_call_holds_its_schema(client: openai.OpenAI, model: str, seed: int) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], tool_choice="required", seed=seed, max_tokens=200
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_a_named_function_streams(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=ASK,
        tools=[WEATHER, NOW],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=100,
        stream=True,
    )
    names, ids, arguments, reasons = [], [], [], []
    for chunk in stream:
        choice = chunk.choices[0]
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            names += [call.function.name] if call.function.name else []
            ids += [call.id] if call.id else []
            arguments.append(call.function.arguments or "")
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert names == ["get_weather"]
    assert len(ids) == 1
    jsonschema.validate(json.loads("".join(arguments)), PARAMETERS)
    assert len([part for part in arguments if part]) > 2
    assert reasons == ["tool_calls"]


def test_the_result_of_a_call_goes_back(client: openai.OpenAI, model: str) -> None:
    first = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=100
    ).choices[0]
    assert first.message.tool_calls
    history: list[Any] = [*ASK, first.message]
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
        for call in first.message.tool_calls
    ]
    second = client.chat.completions.create(
        model=model, messages=history, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=24
    ).choices[0]
    assert second.message.content
    assert not second.message.tool_calls


def test_a_strict_function_is_never_misused(client: openai.OpenAI, model: str) -> None:
    """Whether it calls is the model's choice; how is not."""
    answer = client.chat.completions.create(
        model=model, messages=ASK, tools=[WEATHER], n=4, seed=5, temperature=1.2, max_tokens=60
    )
    for choice in answer.choices:
        assert "<tool_call>" not in (choice.message.content or "")
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            if choice.finish_reason == "tool_calls":
                jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_without_tools_the_template_is_as_before(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
