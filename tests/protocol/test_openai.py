"""Request bodies: every parameter does what it says or is refused by its name."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.protocol.openai import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    FunctionTool,
    Limits,
    ToolCall,
    chat_from_request,
    check_tools,
    completion_from_request,
    parse_chat,
    parse_completion,
)

NO_LIMITS = Limits()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": more}


def chat(limits: Limits = NO_LIMITS, **more: Any) -> ChatRequest:
    body = {"model": "m", "messages": [USER], **more}
    return parse_chat(json.dumps(body).encode(), limits)


def completion(limits: Limits = NO_LIMITS, **more: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **more}).encode(), limits)


def refusal(parse: Any, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**more)
    error: ApiError = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    shape = json.loads(error.body())
    assert shape == {
        "error": {"message": error.message, "type": error.type, "code": error.code, "param": error.param}
    }
    return error


# ---------------------------------------------------------------- what does what it says


def test_everything_at_once() -> None:
    request = chat(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        seed=-1,
        stop=["a", "b"],
        n=8,
        logprobs=True,
        top_logprobs=20,
        logit_bias={"5": -100, "7": 1.5},
        presence_penalty=-2,
        frequency_penalty=2,
        repeat_penalty=1.1,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        metadata={"k": "v"},
    )
    assert request == ChatRequest(
        model="m",
        messages=(ChatMessage("user", "hi"),),
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        seed=2**64 - 1,
        stop=("a", "b"),
        n=8,
        logprobs=20,
        logit_bias=((5, -100.0), (7, 1.5)),
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repeat_penalty=1.1,
        stream=True,
        include_usage=True,
        user="u",
        metadata={"k": "v"},
    )


NULLABLE = [
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n"),
    *("logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repeat_penalty"),
    *("response_format", "stream", "stream_options", "user", "metadata", "tools", "tool_choice"),
    *("parallel_tool_calls", "audio", "functions", "modalities", "service_tier", "store"),
]


@pytest.mark.parametrize("name", NULLABLE)
def test_null_is_left_out(name: str) -> None:
    parameters: dict[str, Any] = {name: None}
    assert chat(**parameters) == chat()


def test_the_wire_form_leaves_out_defaults_and_comes_back() -> None:
    request = chat(tools=[TOOL], n=2, response_format={"type": "json_object"})
    wire = msgspec.json.decode(msgspec.json.encode(request.to_request()))
    assert chat_from_request(wire) == request
    assert chat().to_request() == {"model": "m", "messages": ({"role": "user", "content": "hi"},)}
    text = completion(prompt=[1, 2], logprobs=3)
    assert completion_from_request(msgspec.json.decode(msgspec.json.encode(text.to_request()))) == text


@given(
    st.floats(0, 2),
    st.integers(-(2**63), 2**64 - 1),
    st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4),
    st.text(max_size=20),
    st.dictionaries(st.integers(0, 10**9).map(str), st.floats(-100, 100), max_size=3),
)
def test_values_come_through(
    temperature: float, seed: int, stop: list[str], content: str, bias: dict[str, float]
) -> None:
    request = chat(
        temperature=temperature,
        seed=seed,
        stop=stop,
        logit_bias=bias,
        messages=[{**USER, "content": content}],
    )
    assert request.temperature == temperature
    assert request.seed == seed % 2**64
    assert request.stop == tuple(stop)
    assert request.logit_bias == tuple((int(key), value) for key, value in bias.items())
    assert request.messages[0].content == content
    assert chat_from_request(request.to_request()) == request


def test_messages_as_templates_read_them() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "2+3?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "refusal": "no more"},
        ],
        tools=[TOOL],
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert request.template_messages() == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "2+3?", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "no more"},
    ]
    assert request.template_tools() == [TOOL]
    assert request.messages[2].tool_calls == (ToolCall("c1", "add", '{"a": 1}'),)


@pytest.mark.parametrize("arguments", ["not json", "[1]", "", '"x"', "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    made = {**CALL, "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    request = chat(messages=[USER, {"role": "assistant", "tool_calls": [made]}, answer])
    assert request.template_messages()[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_tools() -> None:
    request = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert request.tools == (FunctionTool("add", parameters={"type": "object"}),)
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.tool_choice == "function:add"
    assert chat(tools=[TOOL], tool_choice="none").tools == ()
    assert chat(tools=[TOOL]).tool_choice == "auto"
    assert chat(tools=[TOOL], tool_choice="none").template_tools() is None


def test_tools_need_a_template_that_has_them() -> None:
    answered = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    for request, param in ((chat(tools=[TOOL]), "tools"), (chat(messages=answered), "messages")):
        check_tools(request, template_has_tools=True)
        with pytest.raises(ApiError) as caught:
            check_tools(request, template_has_tools=False)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert "its chat template has none" in caught.value.message
    check_tools(chat(tools=[TOOL], tool_choice="none"), template_has_tools=False)


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "x", "schema": schema, "strict": True, "description": "d"}
    request = chat(response_format={"type": "json_schema", "json_schema": named})
    assert (request.response_format, request.schema) == ("json_schema", schema)
    assert chat(response_format={"type": "json_object"}).response_format == "json_object"
    assert chat(response_format={"type": "text"}).response_format == "text"


def test_prompts() -> None:
    assert completion(prompt="x").prompt == "x"
    assert completion(prompt=["x"]).prompt == "x"
    assert completion(prompt=[1, 0]).prompt == (1, 0)
    assert completion(prompt=[[3]]).prompt == (3,)
    assert completion(logprobs=0).logprobs == 0
    assert completion(best_of=1, echo=False, suffix=None).prompt == "hi"


# ---------------------------------------------------------------- what is refused

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
CHAT_REFUSALS: list[tuple[dict[str, Any], str | None, str]] = [
    # (parameters, param, code)
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unknown_parameter"),
    ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "unknown_parameter"),
    ({"messages": [{**USER, "x": 1}]}, "messages[0].x", "unknown_parameter"),
    ({"model": ""}, "model", "invalid_value"),
    ({"model": None}, "model", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "function", "name": "f", "content": ""}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "unsupported_parameter",
    ),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1]", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}, "messages[2]", "invalid_value"),
    (
        {"messages": [USER, {"role": "tool", "tool_call_id": "c1", "content": "5"}]},
        "messages[1].tool_call_id",
        "invalid_value",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}]},
        "messages[1].tool_calls",
        "invalid_value",
    ),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 9}, "n", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "invalid_value"),
    ({"logit_bias": {"5": True}}, "logit_bias", "invalid_type"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"repeat_penalty": 0}, "repeat_penalty", "invalid_value"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    ({"response_format": SCHEMA}, "response_format.json_schema.schema", "invalid_schema"),
    ({"response_format": {"type": "json_object"}, "stop": "x"}, "stop", "unsupported_value"),
    ({"tools": [TOOL], "tool_choice": "required", "stop": "x"}, "stop", "unsupported_value"),
    ({"tools": [function(name="f", strict=True)], "stop": "x"}, "stop", "unsupported_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    ({"user": 5}, "user", "invalid_type"),
    ({"user": "x" * 513}, "user", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "invalid_value"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x", "unknown_parameter"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
            ]
        },
        "tools[0].function.parameters",
        "invalid_schema",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "invalid_value"),
]


@pytest.mark.parametrize("index", range(len(CHAT_REFUSALS)))
def test_chat_refusals(index: int) -> None:
    parameters, param, code = CHAT_REFUSALS[index]
    error = refusal(chat, **parameters)
    assert (error.param, error.code) == (param, code)
    assert param is None or param in error.message


UNSUPPORTED: list[tuple[str, list[Any], list[Any]]] = [
    # (parameter, values that ask for nothing, values that ask for something)
    ("audio", [], [{"voice": "x", "format": "mp3"}]),
    ("function_call", ["none"], ["auto", {"name": "f"}]),
    ("functions", [[]], [[{"name": "f"}]]),
    ("modalities", [["text"]], [["text", "audio"]]),
    ("prediction", [], [{"type": "content", "content": "x"}]),
    ("prompt_cache_key", [], ["k"]),
    ("reasoning_effort", [], ["low"]),
    ("safety_identifier", [], ["x"]),
    ("service_tier", ["auto", "default"], ["flex", "priority"]),
    ("store", [False], [True, 0, "no"]),
    ("verbosity", ["medium"], ["low"]),
    ("web_search_options", [], [{}]),
]


@pytest.mark.parametrize("index", range(len(UNSUPPORTED)))
def test_parameters_of_openai_that_are_not_here(index: int) -> None:
    name, neutral, asking = UNSUPPORTED[index]
    for value in neutral:
        assert chat(**{name: value}) == chat()
    for value in asking:
        error = refusal(chat, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "Images"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "Audio"),
        ({"type": "file", "file": {"file_id": "f"}}, "Files"),
    ],
)
def test_images_audio_and_files_are_refused_by_name(part: dict[str, Any], word: str) -> None:
    for role in ("user", "system"):
        text = {"type": "text", "text": "look"}
        error = refusal(chat, messages=[{"role": role, "content": [text, part]}])
        assert error.param == "messages[0].content[1].type"
        assert error.message.startswith(word)


COMPLETION_REFUSALS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": [USER]}, "messages", "unknown_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["a", "b"]}, "prompt", "invalid_value"),
    ({"prompt": [[1], [2]]}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
]


@pytest.mark.parametrize("index", range(len(COMPLETION_REFUSALS)))
def test_completion_refusals(index: int) -> None:
    parameters, param, code = COMPLETION_REFUSALS[index]
    error = refusal(completion, **parameters)
    assert (error.param, error.code) == (param, code)


def test_the_vocabulary_bounds_token_ids() -> None:
    limits = Limits(n_vocab=100)
    assert chat(limits, logit_bias={"99": 1}).logit_bias == ((99, 1.0),)
    assert refusal(chat, limits=limits, logit_bias={"100": 1}).param == "logit_bias.100"
    assert refusal(completion, limits=limits, prompt=[5, 100]).param == "prompt[1]"


def test_limits() -> None:
    assert refusal(chat, limits=Limits(messages=1), messages=[USER, USER]).param == "messages"
    assert refusal(chat, limits=Limits(tools=0), tools=[TOOL]).param == "tools"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}'),
        b'{"metadata":' * 5000,
        b'{"model":"m","user":[' + b"[" * 5000,
    ],
)
def test_bodies_that_are_no_requests(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body)
        assert caught.value.status == 400
        assert caught.value.code in ("invalid_json", "invalid_type")


@given(
    st.dictionaries(
        st.sampled_from([*NULLABLE, "model", "messages", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=5,
    )
)
def test_nothing_but_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    try:
        parse_chat(json.dumps({"model": "m", "messages": [USER], **body}).encode())
    except ApiError as error:
        named = error.param
    else:
        return
    assert named is not None


def test_a_usual_request_is_read_quickly() -> None:
    """The front door's budget is 60 microseconds; a machine under load gets three times as much."""
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, *[USER] * 6],
            "stream": True,
            "temperature": 0.7,
            "max_tokens": 256,
            "stop": ["\n\n"],
        }
    ).encode()
    times = []
    for _ in range(500):
        begin = time.perf_counter()
        parse_chat(body)
        times.append(time.perf_counter() - begin)
    assert sorted(times)[250] < 180e-6
